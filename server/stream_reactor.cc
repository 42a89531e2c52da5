#include "server/stream_reactor.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/encode.h"
#include "server/pushback.h"
#include "server/status_map.h"

namespace expertd {

StreamReactor::StreamReactor(ExpertServiceImpl* service, const ServiceContext& context,
                             absl::Time deadline)
    : service_(service), context_(context), deadline_(deadline) {
  context_.engine->StreamOpened();
  std::unique_lock lock(mutex_);
  Advance(lock);
}

void StreamReactor::Drain() {
  std::unique_lock lock(mutex_);
  draining_ = true;
  Advance(lock);
}

void StreamReactor::OnReadDone(bool ok) {
  std::shared_ptr<Item> item;
  {
    std::unique_lock lock(mutex_);
    reading_ = false;
    if (!ok) {
      closed_ = true;
      Advance(lock);
      return;
    }
    // Ended while this read was under way: nobody would keep this object until the answer.
    if (finished_) return;
    item = std::make_shared<Item>();
    item->request.Swap(&incoming_);
    item->received_at = absl::Now();
    running_.emplace(item.get(), item);
  }
  Accept(item);
  std::unique_lock lock(mutex_);
  Advance(lock);
}

void StreamReactor::Accept(const std::shared_ptr<Item>& item) {
  int64_t inflight;
  {
    std::lock_guard lock(mutex_);
    inflight = static_cast<int64_t>(running_.size());
  }
  if (inflight > context_.max_stream_inflight) {
    Answered(item,
             absl::ResourceExhaustedError(absl::StrCat("more than ", context_.max_stream_inflight,
                                                       " requests of this stream are unanswered")));
    return;
  }
  absl::Status ready = context_.state->Ready();
  if (!ready.ok()) {
    Answered(item, ready);
    return;
  }
  const absl::StatusOr<RequestView> view = Validate(item->request, *context_.model);
  if (!view.ok()) {
    Answered(item, view.status());
    return;
  }
  absl::Time deadline = deadline_;
  if (item->request.timeout_ms() > 0) {
    deadline =
        std::min(deadline, item->received_at + absl::Milliseconds(item->request.timeout_ms()));
  }
  item->submitted_at = absl::Now();
  // The call does not own the item, which owns the call: running_ holds the item until the answer.
  Item* raw = item.get();
  auto call = std::make_shared<Call>(*view, deadline, [this, raw](const Answer& answer) {
    if (answer.status.ok()) {
      EncodeAnswer(answer, raw->call->view, raw->request.request_id(), raw->received_at,
                   raw->submitted_at, raw->response.mutable_result());
    }
    std::shared_ptr<Item> held;
    {
      std::lock_guard lock(mutex_);
      held = running_.at(raw);
    }
    Answered(held, answer.status);
  });
  call->stream = this;
  bool gone;
  {
    std::lock_guard lock(mutex_);
    item->call = call;
    gone = broken_;
  }
  if (gone) {
    Answered(item, absl::CancelledError("the client has gone"));
    return;
  }
  context_.engine->Submit(call);
}

void StreamReactor::Answered(const std::shared_ptr<Item>& item, const absl::Status& status) {
  context_.metrics->RequestAnswered(status.code());
  item->response.set_request_id(item->request.request_id());
  // A refused request is in no budget: it must not lie here until its error item is written.
  v1::ForwardRequest().Swap(&item->request);
  if (!status.ok()) {
    v1::RequestError* error = item->response.mutable_error();
    error->set_code(static_cast<int32_t>(status.code()));
    error->set_message(std::string(status.message()));
    error->set_retry_pushback_ms(static_cast<uint32_t>(PushbackMs(status)));
  }
  std::unique_lock lock(mutex_);
  running_.erase(item.get());
  if (!broken_) outgoing_.push_back(item);
  Advance(lock);
}

void StreamReactor::Advance(std::unique_lock<std::mutex>& lock) {
  if (finished_) return;
  if (broken_ && !writing_) outgoing_.clear();
  const bool read = !reading_ && !closed_ && !broken_ && !draining_ &&
                    static_cast<int64_t>(running_.size() + outgoing_.size()) <=
                        int64_t{2} * context_.max_stream_inflight;
  if (read) reading_ = true;
  const bool write = !writing_ && !outgoing_.empty();
  if (write) writing_ = true;
  const bool over = closed_ || broken_ || draining_;
  const bool finish = over && running_.empty() && outgoing_.empty() && !writing_;
  if (finish) finished_ = true;
  const bool drained = draining_ && !closed_;
  // Under the lock: another thread may finish the stream as soon as it is free. Neither calls back.
  if (read) StartRead(&incoming_);
  if (write) StartWrite(&outgoing_.front()->response);
  lock.unlock();
  if (finish) {
    Finish(drained ? ToGrpc(absl::UnavailableError("draining: the server is shutting down"))
                   : grpc::Status::OK);
  }
}

void StreamReactor::OnWriteDone(bool ok) {
  std::unique_lock lock(mutex_);
  writing_ = false;
  if (!outgoing_.empty()) outgoing_.pop_front();
  if (!ok) broken_ = true;
  Advance(lock);
}

void StreamReactor::OnCancel() {
  std::vector<std::shared_ptr<Call>> calls;
  std::unique_lock lock(mutex_);
  broken_ = true;
  for (const auto& [raw, item] : running_) {
    if (item->call != nullptr) calls.push_back(item->call);
  }
  lock.unlock();
  // gRPC calls OnDone after this returns, so `this` lives although the last answer may finish the
  // stream.
  for (const auto& call : calls) context_.engine->Cancel(*call);
  lock.lock();
  Advance(lock);
}

void StreamReactor::OnDone() {
  service_->Forget(this);
  context_.engine->StreamClosed();
  delete this;
}

}  // namespace expertd
