#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "config/cluster_spec.h"
#include "config/dtype.h"
#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/params.h"
#include "tests/gpu/testing/device.h"
#include "tests/gpu/testing/moe_cases.h"
#include "tests/gpu/testing/rank_site.h"

namespace expertd::testing {

using RankBatches = std::vector<HostBatch>;             // one a rank
using RankOutputs = std::vector<std::vector<uint8_t>>;  // by rank, as it lies in memory

// Rows of `batch` in order, tokens[r] of them to rank r.
RankBatches SplitRows(const HostBatch& batch, int64_t hidden_size,
                      absl::Span<const int32_t> tokens);

// One MoE layer as R ranks: each has its own packed weights (its slots only), inputs, outputs and
// control. What the kernel has to write before it reads starts as NaN, flags as zero.
class RankGroup {
 public:
  struct Options {
    int32_t max_tokens = 0;  // of a rank
    int32_t max_top_k = 0;
    bool partials_bf16 = false;
    // The launch configuration follows the rank's own T instead of the largest of the step.
    bool config_of_own_tokens = false;
    int32_t own_sort_routes = layout::kOwnSortRoutes;  // at most; -1: CTAs always share the sort
  };

  // What is done to a step so that it cannot end normally.
  struct Disturbance {
    int stalled_rank = -1;  // does not do `stall`
    cuda::moe_layer::StallPoint stall = cuda::moe_layer::kStallNowhere;
    absl::Duration timeout = absl::Milliseconds(200);
    // The stop words of these ranks are set when the step has run so long.
    std::vector<int> stopped_ranks;
    absl::Duration stop_after = absl::ZeroDuration();
  };
  struct Disturbed {
    uint32_t step = 0;
    std::vector<cuda::moe_layer::FaultRecord> records;  // by rank
    std::vector<absl::Duration> ended;                  // by rank, since before the first launch
  };

  // UNAVAILABLE where the machine cannot run that many ranks in that mode.
  static absl::StatusOr<std::unique_ptr<RankGroup>> Make(RankMode mode, const HostLayer& layer,
                                                         const Placement& placement,
                                                         const Options& options);
  ~RankGroup();

  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  // One step. Data of earlier steps is NaN before it starts. A fault record fails the test.
  RankOutputs Run(const RankBatches& batches, DType output = DType::kBf16);

  // Steps back to back: neither ranks nor steps are synchronised by the host.
  std::vector<RankOutputs> RunSteps(absl::Span<const RankBatches> steps,
                                    DType output = DType::kBf16);

  // One step that ends with records. Afterwards every workspace is as new.
  Disturbed RunDisturbed(const RankBatches& batches, const Disturbance& disturbance);

  int num_ranks() const { return site_->num_ranks(); }
  uint32_t steps_run() const { return step_; }  // since the workspaces were new

 private:
  struct Control {
    uint32_t stop;
    cuda::moe_layer::FaultRecord fault;
  };
  // The arrays of one rank for a run of steps.
  struct Arrays;
  struct Rank {
    Rank(const HostLayer& layer, const Placement& placement, int rank);
    PackedOnDevice packed;
    DevicePlacement placement;
    cuda::MemoryBlock control;  // pinned
    std::unique_ptr<Arrays> arrays;
  };

  RankGroup(const HostLayer& layer, const Placement& placement, const Options& options);

  void Each(const RankSite::Work& work);  // an error fails the test
  void ClearWorkspaces();
  void PoisonData(int rank, cudaStream_t stream);
  void Upload(absl::Span<const RankBatches> steps, DType output);
  absl::Status LaunchStep(absl::Span<const RankBatches> steps, size_t index, DType output, int rank,
                          const Disturbance& disturbance, cudaStream_t stream);
  std::vector<RankOutputs> Download(absl::Span<const RankBatches> steps, DType output);
  void ExpectNoFault();
  void Watch(const Disturbance& disturbance, absl::Time start, Disturbed* result);
  cuda::moe_layer::MoeLayerParams Params(int rank) const;
  Control& control(int rank) const;

  const LayerSpec spec_;
  const Options options_;
  const int32_t slots_per_rank_;
  const layout::WorkspaceShape shape_;
  std::unique_ptr<RankSite> site_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // made and freed with the rank's device current
  uint32_t step_ = 0;
};

}  // namespace expertd::testing
