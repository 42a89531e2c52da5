#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/batcher.h"
#include "server/copy_pool.h"
#include "server/metrics.h"
#include "server/rank_group.h"
#include "server/step_filler.h"

namespace expertd {

// Runs accepted calls on the backend. One thread owns the Backend: it takes the steps that the rank
// group announces, fills them from the queues, submits them, and answers the calls when they end.
// It sleeps on a condition variable until a call arrives, a step ends, a deadline passes or a batch
// becomes due.
class Engine {
 public:
  struct Options {
    Batcher::Options queue;
    absl::Duration batch_wait = absl::ZeroDuration();
    absl::Duration
        step_timeout;  // from when a step is the oldest running; then the process is done for
  };

  // OK when a generation was formed, the reason when one ended (kernels/fatal.h: for good). On the
  // engine's thread; must not block.
  using OnHealth = std::function<void(const absl::Status&)>;

  Engine(const Options& options, Metrics* metrics, OnHealth on_health);
  ~Engine();  // Stop
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Once, with the weights loaded.
  void Start(std::unique_ptr<Backend> backend);

  // Any thread. The call is answered in any case, perhaps before this returns. Calls before Start
  // or while no generation serves are answered UNAVAILABLE. Zero tokens need no step.
  void Submit(const std::shared_ptr<Call>& call);

  // Any thread: the client has gone. A queued call is forgotten and answered CANCELLED, or
  // DEADLINE_EXCEEDED if its time had come; one that is staged or launched runs on and only its
  // answer is lost.
  void Cancel(Call& call);

  // Any thread. A step that waits for more requests stops waiting once every open stream has one
  // queued (Call::stream).
  void StreamOpened() { ++open_streams_; }
  void StreamClosed();

  // Waits until nothing is queued or running; false if `deadline` came first.
  bool Drain(absl::Time deadline);

  // Answers what is left with `reason`, aborts what runs, ends the thread, destroys the backend.
  void Stop(const absl::Status& reason);

  int64_t num_queued() const { return batcher_.num_queued(); }
  int64_t inflight_bytes() const { return batcher_.inflight_bytes(); }

 private:
  struct Launched {
    internal::v1::Step step;
    StepMemory* memory = nullptr;
    FilledStep filled;
    std::vector<std::shared_ptr<Call>> calls;
    int64_t fill_us = 0;
  };

  void Run();
  // Waits for work, at most until `until`; gives what ended meanwhile and whether to stop.
  bool Wait(absl::Time until, std::vector<StepResult>* ended);
  void LaunchSteps();
  void Launch(const internal::v1::Step& step);
  void Complete(const StepResult& result);
  void AnswerCalls(const Launched& launched, const StepTiming& timing);
  void AnswerExpired(absl::Time now);
  void CheckTimeout(absl::Time now);
  // Closes the generation: answers `launched`'s calls and all queued ones.
  void Fault(const Launched& launched, const absl::Status& status);
  void RefuseQueued(const absl::Status& status);
  void FormIfClosed();
  absl::Time NextWake() const;
  internal::v1::Pending MakePending(absl::Time now) const;
  void Wake();

  const Options options_;
  Metrics* const metrics_;
  const OnHealth on_health_;
  Batcher batcher_;
  std::atomic<int32_t> open_streams_{0};

  // The engine's thread only.
  CopyPool copies_{CopyPool::DefaultHelpers()};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<RankGroup> group_;
  std::deque<Launched> launched_;  // in order, at most limits::kStepsInFlight
  absl::Time oldest_since_;        // when launched_.front() became the oldest
  bool fatal_ = false;
  bool aborted_ = false;

  std::mutex mutex_;
  std::condition_variable wake_;  // the engine's thread waits for work
  std::condition_variable idle_;  // Drain waits for rest
  // Guarded by mutex_.
  bool woken_ = false;
  bool at_rest_ = true;
  bool stopping_ = false;
  absl::Status stop_reason_;
  std::vector<StepResult> ended_;  // in submission order, from the backend's threads

  std::thread thread_;
};

}  // namespace expertd
