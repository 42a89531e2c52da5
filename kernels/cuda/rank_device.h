#pragma once

#include <nccl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device_choice.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/device_thread.h"
#include "kernels/cuda/nccl_comm/communicator.h"
#include "kernels/cuda/step_runner.h"
#include "kernels/cuda/weight_sink.h"

namespace expertd::cuda {

// One rank: its device, the thread that drives it, and everything that lies there.
class RankDevice {
 public:
  // on_overdue: from the device thread, when a step outlived its limit. `options` outlive the rank.
  static absl::StatusOr<std::unique_ptr<RankDevice>> Start(const CudaBackendOptions* options,
                                                           int32_t rank, const DeviceInfo& device,
                                                           std::function<void()> on_overdue);
  // The kernels of all ranks have ended. Leaks what a thread that failed for good may still use.
  ~RankDevice();

  RankDevice(const RankDevice&) = delete;
  RankDevice& operator=(const RankDevice&) = delete;

  // Set-up, in this order, on the device thread. Connect, then either OpenWindow or
  // UseHostExchange, are for several ranks; Connect, OpenWindow and AllocateSteps are collective:
  // all ranks at the same time.
  absl::Status AllocateWeights();
  absl::Status Connect(const ncclUniqueId& id);
  absl::Status OpenWindow(cudaStream_t stream);
  absl::Status UseHostExchange();
  absl::Status AllocateSteps();

  int32_t rank() const { return rank_; }
  const DeviceInfo& device() const { return device_; }
  DeviceThread& thread() { return *thread_; }
  StepRunner& runner() { return *memory_->runner; }
  const Communicator& communicator() const { return *memory_->communicator; }
  const std::vector<DeviceLayer>& layers() const { return layers_; }
  // This rank's part of each step memory, pinned.
  std::vector<uint8_t*> step_memories() const;

  int64_t weight_bytes() const;
  int64_t workspace_bytes() const;  // pinned memory included

 private:
  // Everything that the device thread allocates and frees; destroyed in reverse.
  struct OnDevice {
    std::unique_ptr<Communicator> communicator;
    std::vector<MemoryBlock> weights;  // by layer
    std::unique_ptr<StepRunner> runner;
    std::vector<MemoryBlock> step_memories;  // [kStepMemories], pinned
  };

  RankDevice(const CudaBackendOptions* options, int32_t rank, DeviceInfo device);
  StepRunner::Options RunnerOptions() const;
  absl::Status CheckFits() const;

  const CudaBackendOptions* const options_;
  const int32_t rank_;
  const DeviceInfo device_;
  KernelPath path_;
  std::vector<DeviceLayer> layers_;
  std::unique_ptr<OnDevice> memory_;
  std::unique_ptr<DeviceThread> thread_;
};

}  // namespace expertd::cuda
