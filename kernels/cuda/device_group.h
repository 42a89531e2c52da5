#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device_choice.h"
#include "kernels/cuda/rank_device.h"

namespace expertd::cuda {

// The ranks of a process as one: every step runs on all of them, under one number, and is done when
// all are. One rank is a group without a communicator.
//
// After a step that failed on any rank, or that was told to stop, what the ranks wrote into each
// other's windows cannot be believed. Everything that runs is told to stop; once all ranks' kernels
// have ended all windows are zeroed, and only then is another step launched, as number 1.
class DeviceGroup {
 public:
  // Starts a thread for each device, allocates, connects the ranks. `options` outlive the group.
  static absl::StatusOr<std::unique_ptr<DeviceGroup>> Form(const CudaBackendOptions* options,
                                                           const std::vector<DeviceInfo>& devices);
  ~DeviceGroup();  // waits for submitted steps

  int32_t num_ranks() const { return static_cast<int32_t>(ranks_.size()); }
  RankDevice& rank(int32_t index) { return *ranks_[index]; }
  const std::string& description() const { return description_; }  // how rows are exchanged

  // One thread. The step was validated; `layer` is its index. At most limits::kStepsInFlight are
  // not done. Waits for those in flight if the windows must be zeroed; each of them has a limit.
  absl::Status Submit(const MoeStep& step, int32_t layer, Backend::Done done);

  // Any thread: what runs or is staged ends soon with `reason`; later steps fail with it.
  void Abort(const absl::Status& reason);

 private:
  struct StepRun {
    MoeStep step;
    StepOrder order;
    uint64_t epoch = 0;
    Backend::Done done;
    std::vector<RankResult> results;  // guarded by mutex_, in the order in which ranks ended
    StepTiming timing;                // likewise; the longest of the ranks
  };
  using Work = std::function<absl::Status(RankDevice& rank, cudaStream_t stream)>;

  explicit DeviceGroup(const CudaBackendOptions* options) : options_(options) {}
  absl::Status Start(const std::vector<DeviceInfo>& devices);
  absl::Status Connect();
  // On all ranks at the same time; waits for all. An error names the rank, and is not that of one
  // who only waited for the others.
  absl::Status OnEveryRank(const Work& work);
  absl::StatusOr<std::shared_ptr<StepRun>> Admit(const MoeStep& step);
  absl::Status ResetIfNeeded(std::unique_lock<std::mutex>& lock, uint32_t launches);
  void Finished(RankDevice& rank, const std::shared_ptr<StepRun>& run, absl::Status status);
  absl::Status Conclude(const StepRun& run);
  void StopRunning();

  const CudaBackendOptions* const options_;
  std::string description_;

  std::mutex mutex_;
  std::condition_variable ended_;  // a step did
  int32_t in_flight_ = 0;          // guarded by mutex_, as what follows
  uint64_t submitted_ = 0;
  uint32_t kernel_step_ = 0;   // launches since the windows were zeroed
  uint64_t epoch_ = 1;         // counts how often they were
  uint64_t failed_epoch_ = 0;  // the last in which a step failed
  bool needs_reset_ = false;
  absl::Status abort_reason_;

  std::vector<std::unique_ptr<RankDevice>> ranks_;  // last: their threads use all of the above
};

}  // namespace expertd::cuda
