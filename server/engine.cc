#include "server/engine.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/check.h"
#include "config/limits.h"
#include "kernels/fatal.h"
#include "server/pushback.h"
#include "spdlog/spdlog.h"

namespace expertd {
namespace {

absl::Status Unavailable(const std::string& message) {
  return WithPushback(absl::UnavailableError(message), limits::kRetryPushbackMs);
}

std::string StepName(const internal::v1::Step& step) {
  return absl::StrCat("step ", step.step(), " layer ", step.key().layer());
}

// The condition variable cannot wait for absl::InfiniteFuture(): the sum with the epoch overflows.
std::chrono::system_clock::time_point ToChrono(absl::Time time) {
  return absl::ToChronoTime(std::min(time, absl::Now() + absl::Hours(24)));
}

}  // namespace

Engine::Engine(const Options& options, Metrics* metrics, OnHealth on_health)
    : options_(options),
      metrics_(metrics),
      on_health_(std::move(on_health)),
      batcher_(options.queue) {
  batcher_.Close(Unavailable("loading"));
}

Engine::~Engine() { Stop(absl::UnavailableError("the server is shutting down")); }

void Engine::Start(std::unique_ptr<Backend> backend) {
  EXPERTD_CHECK(!thread_.joinable() && backend_ == nullptr);
  const BackendInfo& info = backend->info();
  LocalRankGroup::Options group;
  group.first_generation = LocalRankGroup::FirstGeneration(absl::Now());
  group.batch_wait = options_.batch_wait;
  group.target_rows = int64_t{info.num_ranks} * info.max_tokens_per_rank;
  group_ = std::make_unique<LocalRankGroup>(group);
  backend_ = std::move(backend);
  batcher_.Open();
  on_health_(absl::OkStatus());
  thread_ = std::thread([this] { Run(); });
}

void Engine::Submit(const std::shared_ptr<Call>& call) {
  if (call->view.num_tokens == 0) {
    call->Finish(Answer{});
    return;
  }
  const absl::Status added = batcher_.Add(call, absl::Now());
  if (!added.ok()) {
    call->Finish(Answer{added, {}, {}});
    return;
  }
  metrics_->RequestAccepted(call->view.num_tokens);
  Wake();
}

void Engine::Cancel(Call& call) {
  // gRPC cancels a call at its deadline too, perhaps before the engine's thread woke up for it.
  const bool expired = absl::Now() >= call.deadline;
  const absl::Status status =
      expired
          ? absl::DeadlineExceededError("the deadline passed in the queue; nothing was computed")
          : absl::CancelledError("cancelled while queued");
  if (!call.AnswerIfQueued(status)) return;
  expired ? metrics_->ExpiredInQueue() : metrics_->CancelledInQueue();
  batcher_.Remove(call);
  Wake();
}

void Engine::StreamClosed() {
  --open_streams_;
  Wake();
}

void Engine::Wake() {
  {
    std::lock_guard lock(mutex_);
    woken_ = true;
    at_rest_ = false;
  }
  wake_.notify_one();
}

bool Engine::Drain(absl::Time deadline) {
  std::unique_lock lock(mutex_);
  return idle_.wait_until(lock, ToChrono(deadline), [this] { return at_rest_; });
}

void Engine::Stop(const absl::Status& reason) {
  batcher_.Close(reason);
  {
    std::lock_guard lock(mutex_);
    if (!stopping_) stop_reason_ = reason;
    stopping_ = true;
    woken_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
  batcher_.Close(reason);  // again: a generation formed at the last moment opened it
  RefuseQueued(reason);
}

bool Engine::Wait(absl::Time until, std::vector<StepResult>* ended) {
  std::unique_lock lock(mutex_);
  if (!woken_ && ended_.empty() && launched_.empty() && batcher_.num_queued() == 0) {
    at_rest_ = true;
    idle_.notify_all();
  }
  wake_.wait_until(lock, ToChrono(until), [this] { return woken_ || !ended_.empty(); });
  woken_ = false;
  ended->swap(ended_);
  return stopping_;
}

void Engine::Run() {
  std::vector<StepResult> ended;
  while (true) {
    ended.clear();
    const bool stop = Wait(NextWake(), &ended);
    for (const StepResult& result : ended) Complete(result);
    const absl::Time now = absl::Now();
    AnswerExpired(now);
    CheckTimeout(now);
    if (!stop) {
      FormIfClosed();
      LaunchSteps();
      FormIfClosed();  // a step that could not even be submitted leaves nothing to wait for
      continue;
    }
    RefuseQueued(stop_reason_);
    if (launched_.empty()) break;
    if (!std::exchange(aborted_, true)) backend_->AbortSteps(stop_reason_);
  }
  backend_.reset();
}

absl::Time Engine::NextWake() const {
  absl::Time next = std::min(batcher_.NextDeadline(), group_->NextChange());
  if (!launched_.empty() && !fatal_) next = std::min(next, oldest_since_ + options_.step_timeout);
  return next;
}

internal::v1::Pending Engine::MakePending(absl::Time now) const {
  internal::v1::Pending pending;
  for (const QueuedBatch& batch : batcher_.Queued()) {
    internal::v1::PendingBatch* message = pending.add_batches();
    *message->mutable_key() = ToProto(batch.key);
    message->set_rows(batch.rows);
    message->set_oldest_age_us(absl::ToInt64Microseconds(now - batch.oldest));
  }
  pending.set_open_streams(open_streams_);
  pending.set_waiting_streams(batcher_.num_waiting_streams());
  return pending;
}

void Engine::LaunchSteps() {
  while (true) {
    const absl::Time now = absl::Now();
    group_->Report(MakePending(now), now);
    const std::optional<internal::v1::Step> step = group_->TakeStep(now);
    if (!step.has_value()) return;
    AnswerExpired(absl::Now());
    Launch(*step);
  }
}

void Engine::Launch(const internal::v1::Step& announced) {
  const BackendInfo& info = backend_->info();
  const BatchKey key = FromProto(announced.key());
  Launched launched;
  launched.step = announced;
  const absl::StatusOr<StepMemory*> memory =
      backend_->AcquireStep(absl::Now() + options_.step_timeout);
  if (!memory.ok()) {
    Fault(launched, memory.status());
    return;
  }
  launched.memory = *memory;
  launched.calls = batcher_.Take(key, int64_t{info.num_ranks} * info.max_tokens_per_rank);
  const absl::Time staged_at = absl::Now();
  launched.filled = FillStep(key, launched.calls, **memory, info.max_tokens_per_rank, copies_);
  launched.filled.step.generation = announced.generation();
  launched.filled.step.step = announced.step();
  launched.fill_us = absl::ToInt64Microseconds(absl::Now() - staged_at);
  for (const auto& call : launched.calls) call->Launch();

  if (launched_.empty()) oldest_since_ = absl::Now();
  launched_.push_back(std::move(launched));
  const absl::Status submitted =
      backend_->Submit(launched_.back().filled.step, [this](StepResult result) {
        // Under the lock, so that the engine is still there: it waits for every step before it
        // goes.
        std::lock_guard lock(mutex_);
        ended_.push_back(std::move(result));
        wake_.notify_one();
      });
  if (submitted.ok()) return;
  Launched refused = std::move(launched_.back());
  launched_.pop_back();
  backend_->ReleaseStep(refused.memory);
  Fault(refused, submitted);
}

void Engine::Complete(const StepResult& result) {
  EXPERTD_CHECK(!launched_.empty());
  const Launched launched = std::move(launched_.front());
  launched_.pop_front();
  oldest_since_ = absl::Now();
  if (result.status.ok()) {
    metrics_->StepDone(launched.filled.rows);
    spdlog::debug("{}: {} rows; us: fill {}, copy in {}, kernel {}, copy out {}",
                  StepName(launched.step), launched.filled.rows, launched.fill_us,
                  result.timing.copy_in_us, result.timing.kernel_us, result.timing.copy_out_us);
    AnswerCalls(launched, result.timing);
    internal::v1::Done done;
    done.set_generation(launched.step.generation());
    done.set_step(launched.step.step());
    group_->Report(done);
  } else {
    Fault(launched, result.status);
  }
  backend_->ReleaseStep(launched.memory);
}

void Engine::AnswerCalls(const Launched& launched, const StepTiming& timing) {
  const MoeStep& step = launched.filled.step;
  const absl::Time now = absl::Now();
  const int64_t in_step_us =
      launched.fill_us + timing.copy_in_us + timing.kernel_us + timing.copy_out_us;
  const auto answer_call = [&](int64_t i) {
    const RequestView& view = launched.calls[i]->view;
    const int64_t row_bytes = view.hidden_size * DTypeBytes(step.output_dtype);
    Answer answer;
    for (const Placed& placed : launched.filled.placed[i]) {
      const char* output = static_cast<const char*>(step.ranks[placed.rank].output);
      answer.rows.push_back({output + placed.first_row * row_bytes, placed.count});
    }
    // What is left of the time since acceptance: in the queue, then staged behind the step before.
    const int64_t held_us = absl::ToInt64Microseconds(now - launched.calls[i]->accepted_at);
    answer.timing.queue_us = std::max<int64_t>(0, held_us - in_step_us);
    answer.timing.copy_in_us = launched.fill_us + timing.copy_in_us;
    answer.timing.kernel_us = timing.kernel_us;
    answer.timing.copy_out_us = timing.copy_out_us;
    answer.timing.step = step.step;
    answer.timing.step_tokens = static_cast<int32_t>(launched.filled.rows);
    launched.calls[i]->Finish(answer);
  };
  // An answer is encoded, and so copied, where it is given.
  int64_t bytes = 0;
  for (const auto& call : launched.calls) {
    bytes += call->view.num_tokens * call->view.hidden_size * DTypeBytes(step.output_dtype);
  }
  copies_.Run(static_cast<int64_t>(launched.calls.size()), bytes, answer_call);
}

void Engine::AnswerExpired(absl::Time now) {
  for (const auto& call : batcher_.TakeExpired(now)) {
    const std::string waited = absl::FormatDuration(now - call->accepted_at);
    if (call->AnswerIfQueued(absl::DeadlineExceededError(absl::StrCat(
            "the deadline passed after ", waited, " in the queue; nothing was computed")))) {
      metrics_->ExpiredInQueue();
    }
  }
}

void Engine::CheckTimeout(absl::Time now) {
  if (launched_.empty() || fatal_ || now < oldest_since_ + options_.step_timeout) return;
  const absl::Status status = MarkFatal(absl::DeadlineExceededError(
      absl::StrCat("did not end within ", absl::FormatDuration(options_.step_timeout))));
  aborted_ = true;
  backend_->AbortSteps(status);
  // Nobody waits for a backend that hangs: these are answered now, whatever it still says.
  for (const Launched& launched : launched_) Fault(launched, status);
}

void Engine::Fault(const Launched& launched, const absl::Status& status) {
  const std::string reason =
      absl::StrCat(StepName(launched.step), ": ", std::string(status.message()));
  const std::string ended =
      absl::StrCat("generation ", launched.step.generation(), " ended: ", reason);
  metrics_->StepFailed();
  const bool first = !group_->closed().has_value();
  if (first) {
    spdlog::error("{}", ended);
    internal::v1::Fault fault;
    fault.set_generation(launched.step.generation());
    fault.set_step(launched.step.step());
    fault.set_reason(reason);
    group_->Report(fault);
    batcher_.Close(Unavailable(ended));
  }
  const bool newly_fatal = IsFatal(status) && !fatal_;
  fatal_ = fatal_ || newly_fatal;
  // Before the answers: whoever gets one finds the process NOT_SERVING or a new generation.
  if (first || newly_fatal) on_health_(status);
  for (const auto& call : launched.calls) call->Finish(Answer{Unavailable(reason), {}, {}});
  if (first) RefuseQueued(Unavailable(ended));
}

void Engine::RefuseQueued(const absl::Status& status) {
  for (const auto& call : batcher_.TakeAll()) call->AnswerIfQueued(status);
}

void Engine::FormIfClosed() {
  if (!group_->closed().has_value() || fatal_ || !launched_.empty()) return;
  group_->Form();
  spdlog::info("generation {} serves", group_->generation());
  batcher_.Open();
  on_health_(absl::OkStatus());
}

}  // namespace expertd
