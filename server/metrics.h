#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace expertd {

// What the daemon counts, as verbs. Any thread; relaxed: readers want totals, not an order.
class Metrics {
 public:
  void RequestAccepted(int64_t rows);
  void RequestAnswered(absl::StatusCode code);
  void CancelledInQueue() { Add(cancelled_in_queue_, 1); }
  void ExpiredInQueue() { Add(expired_in_queue_, 1); }
  void StepDone(int64_t rows);
  void StepFailed() { Add(steps_failed_, 1); }

  uint64_t accepted() const { return accepted_.load(std::memory_order_relaxed); }
  uint64_t accepted_rows() const { return accepted_rows_.load(std::memory_order_relaxed); }
  uint64_t answered(absl::StatusCode code) const;
  uint64_t cancelled_in_queue() const {
    return cancelled_in_queue_.load(std::memory_order_relaxed);
  }
  uint64_t expired_in_queue() const { return expired_in_queue_.load(std::memory_order_relaxed); }
  uint64_t steps() const { return steps_.load(std::memory_order_relaxed); }
  uint64_t step_rows() const { return step_rows_.load(std::memory_order_relaxed); }
  uint64_t steps_failed() const { return steps_failed_.load(std::memory_order_relaxed); }

  std::string Summary() const;  // one line for the log

 private:
  static constexpr int kNumCodes = 17;
  using Counter = std::atomic<uint64_t>;
  static void Add(Counter& counter, uint64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }

  Counter accepted_{0};
  Counter accepted_rows_{0};
  std::array<Counter, kNumCodes> answered_{};
  Counter cancelled_in_queue_{0};
  Counter expired_in_queue_{0};
  Counter steps_{0};
  Counter step_rows_{0};
  Counter steps_failed_{0};
};

}  // namespace expertd
