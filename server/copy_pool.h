#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace expertd {

// Threads that help one thread with copies: a core moves 6 to 10 GB/s of cold memory, a step of
// several ranks holds a hundred megabytes, and its link takes 50 GB/s.
class CopyPool {
 public:
  // num_helpers: threads beside the caller's; with 0 everything runs on the caller's.
  explicit CopyPool(int32_t num_helpers);
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  // A quarter of the cores, for those that compute and those that talk to clients need theirs.
  static int32_t DefaultHelpers();

  // task(0) .. task(count - 1), in any order and at the same time; returns when all have run. Each
  // moves memory and waits for nothing. One caller at a time. `bytes` that all of them move
  // together: few are not worth waking anybody.
  void Run(int64_t count, int64_t bytes, const std::function<void(int64_t)>& task);

 private:
  void Help();
  // Takes tasks until none is left, under the lock but for the tasks themselves.
  void Work(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable work_;  // helpers wait for tasks
  std::condition_variable done_;  // the caller waits for the helpers' last ones
  // Guarded by mutex_.
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t next_ = 0;
  int64_t count_ = 0;
  int64_t running_ = 0;
  bool stopping_ = false;

  std::vector<std::thread> helpers_;
};

}  // namespace expertd
