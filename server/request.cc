#include "server/request.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "config/check.h"
#include "kernels/formats.h"

namespace expertd {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

void RequestView::CopyHidden(int64_t first, int64_t count, void* out) const {
  if (hidden_values == nullptr) {
    const int64_t row_bytes = hidden_size * DTypeBytes(key.input_dtype);
    std::memcpy(out, static_cast<const char*>(hidden_bytes) + first * row_bytes, count * row_bytes);
    return;
  }
  const float* values = hidden_values + first * hidden_size;
  if (key.input_dtype == DType::kF32) {
    std::memcpy(out, values, count * hidden_size * sizeof(float));
    return;
  }
  uint16_t* rounded = static_cast<uint16_t*>(out);
  std::transform(values, values + count * hidden_size, rounded, FloatToBf16);
}

void RequestView::CopyRoutes(int64_t first, int64_t count, int32_t step_top_k, int32_t* ids,
                             float* weights) const {
  const int64_t row_bytes = int64_t{top_k} * 4;
  const char* from_ids = static_cast<const char*>(expert_ids) + first * row_bytes;
  const char* from_weights = static_cast<const char*>(routing_weights) + first * row_bytes;
  for (int64_t row = 0; row < count; ++row) {
    std::memcpy(ids, from_ids + row * row_bytes, row_bytes);
    std::memcpy(weights, from_weights + row * row_bytes, row_bytes);
    std::fill(ids + top_k, ids + step_top_k, -1);
    std::fill(weights + top_k, weights + step_top_k, 0.0f);
    ids += step_top_k;
    weights += step_top_k;
  }
}

bool ByteBudget::TryTake(int64_t bytes) {
  int64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (bytes > limit_ - used) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return true;
}

Call::~Call() {
  if (budget_ != nullptr) budget_->Return(view.held_bytes);
}

bool Call::Stage() {
  CallState expected = CallState::kQueued;
  return state_.compare_exchange_strong(expected, CallState::kStaged, std::memory_order_acq_rel);
}

void Call::Launch() {
  CallState expected = CallState::kStaged;
  EXPERTD_CHECK(state_.compare_exchange_strong(expected, CallState::kLaunched));
}

bool Call::AnswerIfQueued(const absl::Status& status) {
  CallState expected = CallState::kQueued;
  if (!state_.compare_exchange_strong(expected, CallState::kAnswered, std::memory_order_acq_rel)) {
    return false;
  }
  on_answer_(Answer{status, {}, {}});
  return true;
}

void Call::Finish(const Answer& answer) {
  if (state_.exchange(CallState::kAnswered, std::memory_order_acq_rel) == CallState::kAnswered) {
    return;
  }
  on_answer_(answer);
}

}  // namespace expertd
