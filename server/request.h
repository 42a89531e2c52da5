#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "config/dtype.h"

namespace expertd {

// Requests with the same key may share a step.
struct BatchKey {
  int32_t layer = 0;
  DType input_dtype = DType::kBf16;
  DType output_dtype = DType::kBf16;

  auto operator<=>(const BatchKey&) const = default;
};

// A validated request: views of the message it came in, which must stay where it is until the
// answer. The pointers may have any alignment.
struct RequestView {
  BatchKey key;
  int32_t num_tokens = 0;   // T
  int32_t top_k = 0;        // K
  int64_t hidden_size = 0;  // H

  const void* hidden_bytes = nullptr;     // [T, H] of key.input_dtype, or
  const float* hidden_values = nullptr;   // [T, H], rounded to key.input_dtype when copied
  const void* expert_ids = nullptr;       // [T, K] int32
  const void* routing_weights = nullptr;  // [T, K] float
  bool as_numbers = false;                // answer in numbers too

  // What the request and its answer hold in memory.
  int64_t held_bytes = 0;

  // Rows [first, first + count) in key.input_dtype.
  void CopyHidden(int64_t first, int64_t count, void* out) const;
  // The same rows' [count, K] ids and weights into rows of `step_top_k`, padded with -1 and 0.
  void CopyRoutes(int64_t first, int64_t count, int32_t step_top_k, int32_t* ids,
                  float* weights) const;
};

// Memory held by requests that are not answered and sent yet. Any thread.
class ByteBudget {
 public:
  explicit ByteBudget(int64_t limit) : limit_(limit) {}

  bool TryTake(int64_t bytes);
  void Return(int64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  int64_t used() const { return used_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }

 private:
  const int64_t limit_;
  std::atomic<int64_t> used_{0};
};

// Where the answer's rows lie, in order. Valid only during the answer callback.
struct OutputRows {
  const void* data = nullptr;  // [count, H] of key.output_dtype
  int64_t count = 0;
};

struct CallTiming {
  int64_t queue_us = 0;
  int64_t copy_in_us = 0;
  int64_t kernel_us = 0;
  int64_t copy_out_us = 0;
  uint64_t step = 0;
  int32_t step_tokens = 0;
};

struct Answer {
  absl::Status status;
  std::vector<OutputRows> rows;  // if OK
  CallTiming timing;
};

enum class CallState : uint8_t { kQueued, kStaged, kLaunched, kAnswered };

// One request on its way: queued, staged, launched, answered. The answer is given once, by whoever
// moves the call to kAnswered. Only a queued call can be answered by its client's departure or its
// deadline; from kStaged on the engine reads the message and is the only one to answer.
class Call {
 public:
  // `on_answer` runs once, on the thread that answers, and must not block.
  using OnAnswer = std::function<void(const Answer&)>;

  Call(RequestView view, absl::Time deadline, OnAnswer on_answer)
      : view(view), deadline(deadline), on_answer_(std::move(on_answer)) {}
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const RequestView view;
  const absl::Time deadline;  // absl::InfiniteFuture() = none

  // The ForwardStream that it came in, if any; set before Submit and only compared.
  const void* stream = nullptr;

  // Set by Batcher::Add, under its lock, before another thread can see them.
  absl::Time accepted_at;
  uint64_t ticket = 0;  // order of arrival
  // Taken from the budget until the call is destroyed, which its owner does after sending the
  // answer.
  void HoldBytes(std::shared_ptr<ByteBudget> budget) { budget_ = std::move(budget); }

  CallState state() const { return state_.load(std::memory_order_acquire); }

  // queued -> staged; false if it was answered before.
  bool Stage();
  // staged -> launched. Engine only.
  void Launch();
  // queued -> answered with an error; false if it was staged or answered before.
  bool AnswerIfQueued(const absl::Status& status);
  // any -> answered. Engine, or the owner of a call that no other thread has seen.
  void Finish(const Answer& answer);

 private:
  std::atomic<CallState> state_{CallState::kQueued};
  OnAnswer on_answer_;
  std::shared_ptr<ByteBudget> budget_;
};

}  // namespace expertd
