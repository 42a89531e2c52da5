#include "server/batcher.h"

#include "absl/strings/str_cat.h"
#include "config/check.h"
#include "config/limits.h"
#include "server/pushback.h"

namespace expertd {

Batcher::Batcher(const Options& options)
    : options_(options), budget_(std::make_shared<ByteBudget>(options.max_inflight_bytes)) {}

absl::Status Batcher::Add(const std::shared_ptr<Call>& call, absl::Time now) {
  std::lock_guard lock(mutex_);
  if (!closed_.ok()) return closed_;
  if (num_queued_ >= options_.max_queued_requests) {
    return WithPushback(absl::ResourceExhaustedError(absl::StrCat("queue full: ", num_queued_,
                                                                  " requests wait, the limit is ",
                                                                  options_.max_queued_requests)),
                        limits::kRetryPushbackMs);
  }
  if (!budget_->TryTake(call->view.held_bytes)) {
    return WithPushback(absl::ResourceExhaustedError(absl::StrCat(
                            "in-flight bytes: ", budget_->used(), " are held, this request needs ",
                            call->view.held_bytes, ", the limit is ", budget_->limit())),
                        limits::kRetryPushbackMs);
  }
  call->HoldBytes(budget_);
  call->accepted_at = now;
  call->ticket = next_ticket_++;
  Queue& queue = queues_[call->view.key];
  queue.calls.emplace(call->ticket, call);
  queue.rows += call->view.num_tokens;
  if (call->deadline != absl::InfiniteFuture()) {
    deadlines_.emplace(std::make_pair(call->deadline, call->ticket), call->view.key);
  }
  if (call->stream != nullptr) ++stream_calls_[call->stream];
  ++num_queued_;
  return absl::OkStatus();
}

void Batcher::Erase(std::map<BatchKey, Queue>::iterator queue, const Call& call) {
  deadlines_.erase({call.deadline, call.ticket});
  const auto stream = stream_calls_.find(call.stream);
  if (stream != stream_calls_.end() && --stream->second == 0) stream_calls_.erase(stream);
  queue->second.rows -= call.view.num_tokens;
  --num_queued_;
  queue->second.calls.erase(call.ticket);
  if (queue->second.calls.empty()) queues_.erase(queue);
}

bool Batcher::Remove(const Call& call) {
  std::shared_ptr<Call> removed;  // destroyed after the lock
  std::lock_guard lock(mutex_);
  const auto queue = queues_.find(call.view.key);
  if (queue == queues_.end()) return false;
  const auto found = queue->second.calls.find(call.ticket);
  if (found == queue->second.calls.end()) return false;
  removed = found->second;
  Erase(queue, call);
  return true;
}

std::vector<std::shared_ptr<Call>> Batcher::Take(const BatchKey& key, int64_t max_rows) {
  std::vector<std::shared_ptr<Call>> taken;
  std::lock_guard lock(mutex_);
  int64_t rows = 0;
  for (auto queue = queues_.find(key); queue != queues_.end(); queue = queues_.find(key)) {
    const std::shared_ptr<Call> call = queue->second.calls.begin()->second;
    if (rows + call->view.num_tokens > max_rows) break;
    Erase(queue, *call);
    if (!call->Stage()) continue;  // cancelled between its answer and its removal
    rows += call->view.num_tokens;
    taken.push_back(call);
  }
  return taken;
}

std::vector<std::shared_ptr<Call>> Batcher::TakeExpired(absl::Time now) {
  std::vector<std::shared_ptr<Call>> expired;
  std::lock_guard lock(mutex_);
  while (!deadlines_.empty() && deadlines_.begin()->first.first <= now) {
    const auto queue = queues_.find(deadlines_.begin()->second);
    EXPERTD_CHECK(queue != queues_.end());
    const auto found = queue->second.calls.find(deadlines_.begin()->first.second);
    EXPERTD_CHECK(found != queue->second.calls.end());
    expired.push_back(found->second);
    Erase(queue, *expired.back());
  }
  return expired;
}

std::vector<std::shared_ptr<Call>> Batcher::TakeAll() {
  std::vector<std::shared_ptr<Call>> all;
  std::lock_guard lock(mutex_);
  for (const auto& [key, queue] : queues_) {
    for (const auto& [ticket, call] : queue.calls) all.push_back(call);
  }
  queues_.clear();
  deadlines_.clear();
  stream_calls_.clear();
  num_queued_ = 0;
  return all;
}

void Batcher::Close(absl::Status reason) {
  std::lock_guard lock(mutex_);
  closed_ = std::move(reason);
}

void Batcher::Open() { Close(absl::OkStatus()); }

std::vector<QueuedBatch> Batcher::Queued() const {
  std::lock_guard lock(mutex_);
  std::vector<QueuedBatch> batches;
  batches.reserve(queues_.size());
  for (const auto& [key, queue] : queues_) {
    batches.push_back({key, queue.rows, queue.calls.begin()->second->accepted_at});
  }
  return batches;
}

absl::Time Batcher::NextDeadline() const {
  std::lock_guard lock(mutex_);
  return deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first.first;
}

int64_t Batcher::num_queued() const {
  std::lock_guard lock(mutex_);
  return num_queued_;
}

int32_t Batcher::num_waiting_streams() const {
  std::lock_guard lock(mutex_);
  return static_cast<int32_t>(stream_calls_.size());
}

}  // namespace expertd
