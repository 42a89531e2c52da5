#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/cluster_spec.h"
#include "config/limits.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/memory_plan.h"
#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/weight_sink.h"
#include "kernels/step.h"

namespace expertd::cuda {

// A layer as the kernel's configuration sees it, on the one rank.
LayerShape KernelShapeOf(const LayerSpec& spec, int32_t num_slots);

// The device memory of steps and what is enqueued for one. Everything but Stop belongs to the
// device thread. At most limits::kStepsInFlight steps are between Enqueue and Collect; each has an
// index of its own below that number.
class StepRunner {
 public:
  struct Options {
    std::vector<LayerSpec> layers;
    std::shared_ptr<const Placement> placement;
    int32_t max_tokens = 0;
    KernelPath path = KernelPath::kFused;
    int32_t num_sms = 0;
  };

  // Allocates all memory of steps.
  static absl::StatusOr<std::unique_ptr<StepRunner>> Create(const Options& options);

  // Copies in, computes, copies out, on the stream. Views of the step stay valid until Collect.
  absl::Status Enqueue(const MoeStep& step, const DeviceLayer& layer, int index,
                       cudaStream_t stream);

  // After the GPU has passed the step: did it complete, and where did its time go.
  absl::Status Collect(int index, StepTiming* timing);

  // Any thread: what runs ends soon and leaves a fault record; so does what is enqueued already.
  // Steps enqueued after the failed ones were collected run again, unless `for_good`.
  void Stop(bool for_good);

  int64_t device_bytes() const { return device_bytes_; }
  int64_t pinned_bytes() const { return static_cast<int64_t>(control_.bytes()); }
  const std::string& description() const { return description_; }

 private:
  // In pinned memory that the kernel sees.
  struct Control {
    uint32_t stop;
    uint32_t stop_for_good;  // host only
    moe_layer::FaultRecord faults[limits::kStepsInFlight];
  };
  struct InFlight {
    std::array<Event, 4> marks;  // start, inputs there, computed, output back
    bool empty = false;          // no rows: nothing was enqueued
    uint64_t resets = 0;         // resets_ when it was enqueued
  };

  explicit StepRunner(const Options& options) : options_(options) {}
  absl::Status Allocate();
  absl::Status UploadPlacement();
  absl::Status ResetWorkspace(cudaStream_t stream);
  absl::Status CopyIn(const MoeStep& step, int64_t hidden_size, cudaStream_t stream);
  absl::Status Compute(const MoeStep& step, const DeviceLayer& layer, int index,
                       cudaStream_t stream);
  absl::Status LaunchFused(const MoeStep& step, const DeviceLayer& layer, int index,
                           cudaStream_t stream);
  absl::Status LaunchPlain(const MoeStep& step, const DeviceLayer& layer, cudaStream_t stream);

  template <typename T>
  T* step_array(int64_t offset) const {
    return reinterpret_cast<T*>(step_memory_.as<char>() + offset);
  }
  Control* control() const { return control_.as<Control>(); }
  absl::Status FaultStatus(const moe_layer::FaultRecord& fault) const;

  const Options options_;
  StepLayout layout_;
  MemoryBlock step_memory_;
  MemoryBlock workspace_;
  MemoryBlock placement_tables_;
  MemoryBlock control_;
  const int32_t* first_slot_ = nullptr;  // device, [E + 1]
  const int32_t* slots_ = nullptr;       // device
  int64_t device_bytes_ = 0;
  std::string description_;

  std::array<InFlight, limits::kStepsInFlight> in_flight_;
  uint32_t kernel_step_ = 0;  // steps since the workspace was zeroed
  uint64_t resets_ = 0;
  bool needs_reset_ = true;
};

}  // namespace expertd::cuda
