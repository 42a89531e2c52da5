#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config/cluster_spec.h"
#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/params.h"
#include "tests/gpu/testing/moe_cases.h"

namespace expertd::simt {

// One MoE layer as R ranks of emulated GPUs: each with its own packed weights, and a window of one
// allocation. What the kernel has to write before it reads starts as NaN.
class RankLayer {
 public:
  struct Options {
    int num_ctas = 2;  // of a rank
    int max_tokens = 0;
    int max_top_k = 0;
    bool partials_bf16 = false;
    uint64_t timeout_ns = 1'000'000'000;
    int stalled_rank = -1;
    cuda::moe_layer::StallPoint stall = cuda::moe_layer::kStallNowhere;
    uint32_t first_stalled_step = 1;
    uint64_t seed = 1;
    int own_sort_routes = layout::kOwnSortRoutes;  // at most; -1: the CTAs always share the sort
    bool far_lists = false;  // a CTA's own list of routes is in the workspace, however short
  };
  using Batches = std::vector<testing::HostBatch>;  // by rank

  RankLayer(const testing::HostLayer& layer, const Placement& placement, const Options& options);
  ~RankLayer();

  // Steps one after the other on every rank, the ranks side by side. F32 outputs by step and rank;
  // what went wrong in `error`.
  std::vector<std::vector<std::vector<float>>> Run(const std::vector<Batches>& steps);

  const std::string& error() const { return error_; }
  const cuda::moe_layer::FaultRecord& fault(int rank) const;
  void Stop(int rank);

  // Of the last step: the list that the rank's CTAs share (-1) or that of one of them.
  const uint32_t* routes(int rank, int list) const;
  const uint16_t* slots(int rank, int list) const;

 private:
  struct Rank;
  cuda::moe_layer::MoeLayerParams ParamsOf(int rank, const testing::HostBatch& batch,
                                           float* output);

  const LayerSpec spec_;
  const Placement placement_;
  const Options options_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::unique_ptr<uint8_t[]> memory_;
  char* windows_ = nullptr;
  layout::WorkspaceOffsets offsets_;
  uint32_t step_ = 0;
  std::string error_;
};

}  // namespace expertd::simt
