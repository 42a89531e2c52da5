#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace expertd {

// The threads of one rank: the caller of Run and num_threads - 1 helpers. Between runs the helpers
// spin for a moment (a step is several short runs) and then sleep.
class ThreadGroup {
 public:
  // `spin`: false where there are more threads than cores, a spinning helper would steal the core.
  // Throws std::system_error if the system gives no more threads.
  ThreadGroup(int num_threads, bool spin);
  ~ThreadGroup() { Stop(); }
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  int num_threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // body(item, thread) for every item of 0..num_items-1, each once, on thread 0..num_threads-1 (0
  // is the caller). Returns when all are done. One caller at a time. The body ends by itself: a
  // body that should stop early looks at its own flag.
  using Body = absl::FunctionRef<void(int64_t item, int thread)>;
  void Run(int64_t num_items, Body body);

 private:
  void Stop();
  void HelperLoop(int thread);
  void Work(const Body& body, int64_t num_items, int thread);

  const bool spin_;
  std::atomic<int64_t> next_item_{0};
  std::atomic<int> helpers_busy_{0};
  std::atomic<uint64_t> epoch_{0};  // a new value is a new run
  std::atomic<bool> stop_{false};
  const Body* body_ = nullptr;  // written before epoch_ changes, read after
  int64_t num_items_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;  // helpers wait for epoch_ or stop_
  std::condition_variable idle_;  // the caller waits for helpers_busy_ == 0
  std::vector<std::thread> helpers_;
};

}  // namespace expertd
