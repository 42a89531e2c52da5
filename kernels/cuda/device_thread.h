#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/cuda/device_memory.h"

namespace expertd::cuda {

// The one thread that calls CUDA for one device, with the one stream it uses. Work runs in the
// order in which it was posted; while some of it is on the GPU the thread polls for its end and
// starts what comes next. Callers bound how much they post.
class DeviceThread {
 public:
  using Work = std::function<absl::Status(cudaStream_t)>;
  using Done = std::function<void(absl::Status)>;

  // on_overdue: from the thread, once for a job that outlived its limit: tell the kernel to stop.
  static absl::StatusOr<std::unique_ptr<DeviceThread>> Start(int device,
                                                             std::function<void()> on_overdue);
  // Waits for everything posted (each job has a limit).
  ~DeviceThread();

  // Runs `work` on the thread and waits until the GPU has passed what it enqueued: set-up, tests.
  absl::Status Run(Work work);

  // `launch` enqueues GPU work; `done` is called once, on the thread, in the order of posting, when
  // the GPU has passed it, or with the error that kept it from running. The first fatal error
  // (kernels/ fatal.h) fails everything after it. A job that runs longer than `limit` is told to
  // stop, and if it does not within limits::kCudaStopGraceMs the error is fatal.
  void Post(Work launch, absl::Duration limit, Done done);

  // Not OK after a fatal error: the GPU may still be writing, so its memory must not be freed.
  absl::Status health() const;

 private:
  struct Job {
    Work launch;
    absl::Duration limit;
    Done done;
  };
  struct Running {
    Event end;
    absl::Time overdue_at;
    absl::Time hopeless_at;
    absl::Duration limit;
    bool told_to_stop = false;
    Done done;
  };

  explicit DeviceThread(std::function<void()> on_overdue);

  void Loop(int device);
  absl::Status SetUp(int device);
  void StartJob(Job job);
  absl::Status Enqueue(const Work& launch, Event* end);
  bool FinishOldest();  // false: still running
  void FailRunning(const absl::Status& status);
  absl::Status Remember(absl::Status status);  // keeps the first fatal one

  const std::function<void()> on_overdue_;

  mutable std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<Job> jobs_;   // guarded by mutex_
  bool stopping_ = false;  // guarded by mutex_
  absl::Status health_;    // guarded by mutex_

  // of the thread
  cudaStream_t stream_ = nullptr;
  std::deque<Running> running_;
  std::vector<Event> spare_events_;

  std::thread thread_;
};

}  // namespace expertd::cuda
