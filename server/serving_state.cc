#include "server/serving_state.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/limits.h"
#include "server/pushback.h"

namespace expertd {

ServingState::ServingState(std::function<void(bool)> on_change)
    : on_change_(std::move(on_change)) {}

void ServingState::Enter(v1::State state) {
  if (state_ == v1::STATE_LOADING) load_time_ = absl::Now() - start_;
  state_ = state;
  on_change_(state == v1::STATE_SERVING);
  changed_.notify_all();
}

void ServingState::SetProgress(int64_t bytes_done, int64_t bytes_total) {
  std::lock_guard lock(mutex_);
  bytes_done_ = bytes_done;
  bytes_total_ = bytes_total;
}

void ServingState::Serve() {
  std::lock_guard lock(mutex_);
  if (state_ == v1::STATE_DRAINING || final_) return;
  Enter(v1::STATE_SERVING);
}

void ServingState::Fail(const absl::Status& reason, bool is_final) {
  std::lock_guard lock(mutex_);
  if (final_ || state_ == v1::STATE_DRAINING) return;
  final_ = is_final;
  reason_ = reason;
  Enter(v1::STATE_FAILED);
}

void ServingState::Drain() {
  std::lock_guard lock(mutex_);
  if (state_ != v1::STATE_DRAINING) Enter(v1::STATE_DRAINING);
}

void ServingState::Refuse() {
  std::lock_guard lock(mutex_);
  refusing_ = true;
  changed_.notify_all();
}

absl::Status ServingState::Ready() const {
  std::lock_guard lock(mutex_);
  if (refusing_) return absl::UnavailableError("draining: the server is shutting down");
  switch (state_) {
    case v1::STATE_SERVING:
    case v1::STATE_DRAINING:  // within the grace time
      return absl::OkStatus();
    case v1::STATE_LOADING: {
      const int64_t percent = bytes_total_ > 0 ? 100 * bytes_done_ / bytes_total_ : 0;
      return absl::UnavailableError(
          absl::StrCat("loading: ", percent, " % of ", bytes_total_, " bytes"));
    }
    default:
      return WithPushback(absl::UnavailableError(std::string(reason_.message())),
                          final_ ? 0 : limits::kRetryPushbackMs);
  }
}

v1::State ServingState::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

v1::LoadProgress ServingState::progress() const {
  std::lock_guard lock(mutex_);
  v1::LoadProgress progress;
  progress.set_state(state_);
  progress.set_bytes_done(bytes_done_);
  progress.set_bytes_total(bytes_total_);
  const bool loading = load_time_ == absl::ZeroDuration();
  progress.set_elapsed_s(absl::ToDoubleSeconds(loading ? absl::Now() - start_ : load_time_));
  return progress;
}

absl::Status ServingState::WaitUntilLoaded(absl::Time deadline) const {
  std::unique_lock lock(mutex_);
  const bool loaded = changed_.wait_until(lock, absl::ToChronoTime(deadline),
                                          [this] { return state_ != v1::STATE_LOADING; });
  if (!loaded) return absl::DeadlineExceededError("still loading");
  if (state_ == v1::STATE_SERVING) return absl::OkStatus();
  if (state_ == v1::STATE_FAILED) return reason_;
  return absl::UnavailableError("draining: the server is shutting down");
}

absl::Status ServingState::WaitUntilOver() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return final_ || state_ == v1::STATE_DRAINING; });
  return final_ ? reason_ : absl::OkStatus();
}

}  // namespace expertd
