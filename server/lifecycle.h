#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "absl/time/time.h"

namespace expertd {

// SIGTERM and SIGINT while it lives. The handler only writes to a pipe; a thread reads it: the
// first signal runs `on_terminate`, which must not block; the second ends the process at once, by
// that signal. At most one in a process.
class SignalWatcher {
 public:
  explicit SignalWatcher(std::function<void()> on_terminate);
  ~SignalWatcher();  // restores what the signals did before
  SignalWatcher(const SignalWatcher&) = delete;
  SignalWatcher& operator=(const SignalWatcher&) = delete;

 private:
  void Run();

  const std::function<void()> on_terminate_;
  int read_end_ = -1;
  int write_end_ = -1;
  std::thread thread_;
};

// Ends the process with exit_codes::kSoftware at `deadline` unless it was destroyed before: gRPC's
// Shutdown waits without limit for a call that never finishes.
class Watchdog {
 public:
  Watchdog(std::string what, absl::Time deadline);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  const std::string what_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool disarmed_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace expertd
