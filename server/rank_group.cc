#include "server/rank_group.h"

#include <algorithm>

#include "config/check.h"
#include "config/limits.h"

namespace expertd {
namespace {

v1::DType ToProto(DType dtype) { return dtype == DType::kBf16 ? v1::DTYPE_BF16 : v1::DTYPE_F32; }
DType FromProto(v1::DType dtype) { return dtype == v1::DTYPE_F32 ? DType::kF32 : DType::kBf16; }

}  // namespace

internal::v1::BatchKey ToProto(const BatchKey& key) {
  internal::v1::BatchKey message;
  message.set_layer(key.layer);
  message.set_input_dtype(ToProto(key.input_dtype));
  message.set_output_dtype(ToProto(key.output_dtype));
  return message;
}

BatchKey FromProto(const internal::v1::BatchKey& key) {
  return {key.layer(), FromProto(key.input_dtype()), FromProto(key.output_dtype())};
}

uint64_t LocalRankGroup::FirstGeneration(absl::Time start) {
  return static_cast<uint64_t>(absl::ToUnixSeconds(start)) << 16;
}

void LocalRankGroup::Report(const internal::v1::Pending& pending, absl::Time now) {
  all_streams_wait_ =
      pending.open_streams() > 0 && pending.waiting_streams() >= pending.open_streams();
  waiting_.clear();
  for (const auto& batch : pending.batches()) {
    waiting_[FromProto(batch.key())] = {batch.rows(),
                                        now - absl::Microseconds(batch.oldest_age_us())};
  }
}

absl::Time LocalRankGroup::EligibleAt(const Waiting& waiting) const {
  const bool due = all_streams_wait_ || waiting.rows >= options_.target_rows;
  return due ? waiting.oldest : waiting.oldest + options_.batch_wait;
}

std::optional<internal::v1::Step> LocalRankGroup::TakeStep(absl::Time now) {
  if (closed_.has_value() || next_step_ - done_ >= limits::kStepsInFlight) return std::nullopt;
  auto chosen = waiting_.end();
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if (EligibleAt(it->second) > now) continue;
    if (chosen == waiting_.end() || it->second.oldest < chosen->second.oldest) chosen = it;
  }
  if (chosen == waiting_.end()) return std::nullopt;

  internal::v1::Step step;
  step.set_generation(generation_);
  step.set_step(next_step_++);
  *step.mutable_key() = ToProto(chosen->first);
  waiting_.erase(chosen);  // what the step does not take is in the next report
  return step;
}

absl::Time LocalRankGroup::NextChange() const {
  absl::Time next = absl::InfiniteFuture();
  if (closed_.has_value() || next_step_ - done_ >= limits::kStepsInFlight) return next;
  for (const auto& [key, waiting] : waiting_) next = std::min(next, EligibleAt(waiting));
  return next;
}

void LocalRankGroup::Report(const internal::v1::Done& done) {
  if (done.generation() != generation_ || closed_.has_value()) return;
  EXPERTD_CHECK(done.step() == done_ && done_ < next_step_);
  ++done_;
}

void LocalRankGroup::Report(const internal::v1::Fault& fault) {
  if (fault.generation() != generation_ || closed_.has_value()) return;
  closed_.emplace();
  closed_->set_generation(generation_);
  closed_->set_reason(fault.reason());
  waiting_.clear();
}

void LocalRankGroup::Form() {
  EXPERTD_CHECK(closed_.has_value());
  closed_.reset();
  ++generation_;
  next_step_ = 0;
  done_ = 0;
}

}  // namespace expertd
