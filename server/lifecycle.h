#pragma once

#include <condition_variable>
#include <csignal>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "absl/time/time.h"

namespace expertd {

// SIGTERM and SIGINT while it lives. The handler only writes to a pipe; a thread reads it: the
// first signal runs what OnTerminate was given, the second ends the process at once, by that
// signal. SIGPIPE is ignored: a log reader that went first must not end a process that drains.
// At most one in a process.
class SignalWatcher {
 public:
  SignalWatcher();
  ~SignalWatcher();  // restores what the signals did before
  SignalWatcher(const SignalWatcher&) = delete;
  SignalWatcher& operator=(const SignalWatcher&) = delete;

  // `on_terminate` runs once and must not block: on the watcher's thread at the first signal, or
  // here and now if that came before. Call once.
  void OnTerminate(std::function<void()> on_terminate);

 private:
  void Run();

  struct sigaction before_[3];
  int read_end_ = -1;
  int write_end_ = -1;
  std::mutex mutex_;
  // Guarded by mutex_.
  bool signalled_ = false;
  std::function<void()> on_terminate_;
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
