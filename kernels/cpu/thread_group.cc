#include "kernels/cpu/thread_group.h"

#include <chrono>

namespace expertd {
namespace {

constexpr auto kSpin =
    std::chrono::microseconds(30);  // longer than the gap between two runs of a step

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True if `ready` came true within the spin.
template <typename Ready>
bool SpinUntil(bool spin, Ready ready) {
  if (ready()) return true;
  if (!spin) return false;
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

}  // namespace

ThreadGroup::ThreadGroup(int num_threads, bool spin) : spin_(spin) {
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      helpers_.emplace_back([this, thread] { HelperLoop(thread); });
    }
  } catch (...) {
    Stop();
    throw;
  }
}

void ThreadGroup::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadGroup::Run(int64_t num_items, Body body) {
  next_item_.store(0, std::memory_order_relaxed);
  if (helpers_.empty() || num_items <= 1) {
    Work(body, num_items, 0);
    return;
  }
  body_ = &body;
  num_items_ = num_items;
  helpers_busy_.store(static_cast<int>(helpers_.size()), std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    epoch_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  Work(body, num_items, 0);
  const auto done = [this] { return helpers_busy_.load(std::memory_order_acquire) == 0; };
  if (SpinUntil(spin_, done)) return;
  std::unique_lock lock(mutex_);
  idle_.wait(lock, done);
}

void ThreadGroup::Work(const Body& body, int64_t num_items, int thread) {
  for (;;) {
    const int64_t item = next_item_.fetch_add(1, std::memory_order_relaxed);
    if (item >= num_items) return;
    body(item, thread);
  }
}

void ThreadGroup::HelperLoop(int thread) {
  uint64_t seen = 0;
  for (;;) {
    const auto ready = [&] {
      return epoch_.load(std::memory_order_acquire) != seen ||
             stop_.load(std::memory_order_acquire);
    };
    if (!SpinUntil(spin_, ready)) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, ready);
    }
    if (stop_) return;
    seen = epoch_.load(std::memory_order_acquire);
    Work(*body_, num_items_, thread);
    if (helpers_busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard lock(mutex_);
      idle_.notify_one();
    }
  }
}

}  // namespace expertd
