#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "config/cluster_spec.h"
#include "config/limits.h"
#include "kernels/cuda/comm/peer.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/fault_report.h"
#include "kernels/cuda/host_exchange.h"
#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/memory_plan.h"
#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/weight_sink.h"
#include "kernels/step.h"

namespace expertd::cuda {

// A layer as the kernel's configuration sees it, on one of the ranks.
LayerShape KernelShapeOf(const LayerSpec& spec, int32_t num_slots, int32_t num_ranks);

// What is the same on every rank of a step.
struct StepOrder {
  const MoeStep* step = nullptr;  // valid until Collect, and its views
  int index = 0;                  // below limits::kStepsInFlight, of one step at a time
  uint32_t kernel_step = 0;       // of the step's first launch; each part takes one
  int32_t max_tokens = 0;         // the largest num_tokens of the ranks
};

// One rank's device memory of steps and what is enqueued for one. Everything but Stop belongs to
// the device thread. With several ranks every rank enqueues every step, zero rows included.
class StepRunner {
 public:
  struct Options {
    std::vector<LayerSpec> layers;
    std::shared_ptr<const Placement> placement;
    int32_t rank = 0;
    int32_t max_tokens = 0;
    KernelPath path = KernelPath::kFused;
    int32_t num_sms = 0;
    absl::Duration step_timeout;
    bool partials_bf16 = false;
    // Several ranks: where the ranks' windows are mapped, each zero and of the plan's workspace.
    // One rank allocates its own. With kHostExchange there are none.
    PeerMap peers;
    Communicator* communicator = nullptr;  // kHostExchange
    // Tests only: what this rank leaves out in its next launch.
    std::function<moe_layer::StallPoint(int32_t rank)> stall;
  };

  // What the memory of steps is planned for.
  static MemoryQuestion QuestionOf(const Options& options);

  // Allocates all memory of steps. With kHostExchange collective, as Reset.
  static absl::StatusOr<std::unique_ptr<StepRunner>> Create(const Options& options);

  // Launches of a step: more than one if its K is larger than the workspace is planned for.
  int32_t NumParts(int32_t max_tokens, int32_t top_k) const;

  // Copies in, computes, copies out, on the stream.
  absl::Status Enqueue(const StepOrder& order, const DeviceLayer& layer, cudaStream_t stream);

  // After the GPU has passed the step: did it complete, and where did its time go.
  RankResult Collect(const StepOrder& order, StepTiming* timing);

  // Any thread: what runs ends soon and leaves a fault record; so does what is enqueued, until
  // Reset. `for_good`: also after it.
  void Stop(bool for_good);

  // Once no rank's step runs: a step that left a fault leaves words that the next would believe.
  // Every rank does it before one of them launches again.
  absl::Status Reset(cudaStream_t stream);

  int64_t device_bytes() const { return device_bytes_; }
  int64_t pinned_bytes() const { return static_cast<int64_t>(control_.bytes()); }

 private:
  // In pinned memory that the kernel sees.
  struct Control {
    uint32_t stop;
    uint32_t stop_for_good;  // host only
    moe_layer::FaultRecord faults[limits::kStepsInFlight];
  };
  struct InFlight {
    std::array<Event, 4> marks;  // start, inputs there, computed, output back
    bool empty = false;          // one rank without rows: nothing was enqueued
  };
  // Rows of this rank that one launch takes.
  struct Part {
    int64_t first = 0;
    int32_t tokens = 0;
    int32_t max_tokens = 0;  // the largest of the ranks
    uint32_t kernel_step = 0;
  };

  explicit StepRunner(const Options& options);
  absl::Status Allocate();
  absl::Status UploadPlacement();
  absl::Status MakeExchange();
  absl::Status CopyIn(const MoeStep& step, int64_t hidden_size, cudaStream_t stream);
  absl::Status Compute(const StepOrder& order, const DeviceLayer& layer, cudaStream_t stream);
  absl::Status LaunchFused(const StepOrder& order, const Part& part, const DeviceLayer& layer,
                           cudaStream_t stream);
  UnfusedStep ViewOf(const MoeStep& step, const Part& part, int64_t hidden_size) const;

  const RankBatch& batch(const MoeStep& step) const { return step.ranks[options_.rank]; }
  template <typename T>
  T* step_array(int64_t offset) const {
    return reinterpret_cast<T*>(step_memory_.as<char>() + offset);
  }
  Control* control() const { return control_.as<Control>(); }

  const Options options_;
  const MemoryQuestion question_;
  const int32_t num_ranks_;
  StepLayout layout_;
  MemoryBlock step_memory_;
  MemoryBlock workspace_;  // of one rank
  MemoryBlock placement_tables_;
  MemoryBlock control_;
  PlacementTable placement_;
  PeerMap peers_;
  int64_t workspace_bytes_ = 0;
  int64_t device_bytes_ = 0;
  std::mutex exchange_mutex_;  // Reset replaces what Stop stops
  std::unique_ptr<HostExchange> exchange_;
  std::array<InFlight, limits::kStepsInFlight> in_flight_;
};

}  // namespace expertd::cuda
