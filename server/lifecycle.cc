#include "server/lifecycle.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "config/check.h"
#include "config/exit_codes.h"
#include "spdlog/spdlog.h"

namespace expertd {
namespace {

std::atomic<int> signal_pipe{-1};  // the one piece of state a signal handler can reach

void OnSignal(int signal) {
  const int saved = errno;
  const unsigned char byte = static_cast<unsigned char>(signal);
  if (write(signal_pipe.load(), &byte, 1) != 1) {
    // The pipe is full of signals already.
  }
  errno = saved;
}

constexpr int kSignals[] = {SIGTERM, SIGINT, SIGPIPE};

void Handle(int signal, void (*handler)(int), struct sigaction* before) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, before);
}

}  // namespace

SignalWatcher::SignalWatcher() {
  EXPERTD_CHECK(signal_pipe.load() == -1);
  int ends[2];
  EXPERTD_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  read_end_ = ends[0];
  write_end_ = ends[1];
  fcntl(write_end_, F_SETFL, O_NONBLOCK);
  signal_pipe.store(write_end_);
  thread_ = std::thread([this] { Run(); });
  for (int i = 0; i < 3; ++i) {
    Handle(kSignals[i], kSignals[i] == SIGPIPE ? SIG_IGN : OnSignal, &before_[i]);
  }
}

SignalWatcher::~SignalWatcher() {
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before_[i], nullptr);
  signal_pipe.store(-1);
  close(write_end_);  // the thread reads the end of the pipe
  thread_.join();
  close(read_end_);
}

void SignalWatcher::OnTerminate(std::function<void()> on_terminate) {
  bool run_now;
  {
    std::lock_guard lock(mutex_);
    run_now = signalled_;
    if (!run_now) on_terminate_ = std::move(on_terminate);
  }
  if (run_now) on_terminate();
}

void SignalWatcher::Run() {
  bool terminating = false;
  unsigned char signal = 0;
  while (true) {
    const ssize_t count = read(read_end_, &signal, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    if (terminating) {
      spdlog::warn("second signal: leaving at once");
      spdlog::default_logger()->flush();
      Handle(signal, SIG_DFL, nullptr);
      kill(getpid(), signal);
      continue;
    }
    terminating = true;
    spdlog::info("signal {}: draining", int{signal});
    std::function<void()> on_terminate;
    {
      std::lock_guard lock(mutex_);
      signalled_ = true;
      on_terminate = on_terminate_;
    }
    if (on_terminate != nullptr) on_terminate();
  }
}

Watchdog::Watchdog(std::string what, absl::Time deadline)
    : what_(std::move(what)), thread_([this, deadline] {
        std::unique_lock lock(mutex_);
        const bool disarmed =
            wake_.wait_until(lock, absl::ToChronoTime(deadline), [this] { return disarmed_; });
        if (disarmed) return;
        spdlog::critical("{} did not end in time", what_);
        spdlog::default_logger()->flush();
        _exit(exit_codes::kSoftware);
      }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    disarmed_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

}  // namespace expertd
