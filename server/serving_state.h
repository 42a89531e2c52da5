#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "expertd/v1/expertd.pb.h"

namespace expertd {

// Where the process stands between start and exit, in one place: the services ask it before they
// accept, health and load progress report it. Loading -> serving <-> failed (a generation ended);
// draining is not left again, a final failure only for draining. Any thread.
class ServingState {
 public:
  // `on_change` is told whether Forward is served, in order, under the lock: it must not call back.
  explicit ServingState(std::function<void(bool serving)> on_change);

  void SetProgress(int64_t bytes_done, int64_t bytes_total);
  void Serve();
  void Fail(const absl::Status& reason, bool is_final);
  void Drain();   // NOT_SERVING from now on
  void Refuse();  // and new requests are refused

  // OK, or UNAVAILABLE saying what the process is doing instead.
  absl::Status Ready() const;
  v1::State state() const;
  v1::LoadProgress progress() const;

  // Waits until loading has ended: OK when serving, otherwise what happened.
  absl::Status WaitUntilLoaded(absl::Time deadline) const;
  // Waits for draining or a final failure; OK for the former.
  absl::Status WaitUntilOver() const;

 private:
  void Enter(v1::State state);  // needs mutex_

  const absl::Time start_ = absl::Now();
  const std::function<void(bool)> on_change_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Guarded by mutex_.
  v1::State state_ = v1::STATE_LOADING;
  bool final_ = false;     // failed for good
  bool refusing_ = false;  // draining and past the grace time
  absl::Status reason_;    // of the failure
  int64_t bytes_done_ = 0;
  int64_t bytes_total_ = 0;
  absl::Duration load_time_ = absl::ZeroDuration();  // once loaded
};

}  // namespace expertd
