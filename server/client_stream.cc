#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "expertd/v1/expertd.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/client.h"
#include "server/client_status.h"

namespace expertd {
namespace {

std::chrono::steady_clock::time_point DeadlineAfter(absl::Duration timeout) {
  const absl::Duration bounded = std::min(timeout, absl::Hours(24 * 365));
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(bounded);
}

// OnDone of a cancelled call needs the network for nothing.
constexpr absl::Duration kCancelTimeout = absl::Seconds(10);

}  // namespace

// The stream's state. gRPC's threads call On...; the user's threads call the rest, and destroy it:
// a channel whose last owner is one of gRPC's threads takes that thread's queue with it, and what
// gRPC frees twice then ends the process, or keeps it from ending.
//
// gRPC allows one write at a time, and no operation after its hold on the call is gone: writing_ is
// the one right to start a write or the half-close, and the hold goes when the stream has ended (a
// read failed) and nobody has that right.
class ForwardStream::Reactor
    : public grpc::ClientBidiReactor<v1::ForwardRequest, v1::ForwardStreamResponse> {
 public:
  Reactor(std::shared_ptr<grpc::Channel> channel, int max_inflight)
      : stub_(v1::ExpertService::NewStub(channel)), max_inflight_(max_inflight) {}

  void Start() {
    stub_->async()->ForwardStream(&context_, this);
    AddHold();
    StartRead(&read_);
    StartCall();
  }

  // Whether gRPC has let go of this object; if not, it must live on.
  bool Cancel() {
    context_.TryCancel();
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, DeadlineAfter(kCancelTimeout), [this] { return done_; });
  }

  absl::Status Send(v1::ForwardRequest request, absl::Duration timeout) {
    std::unique_lock lock(mutex_);
    const auto deadline = DeadlineAfter(timeout);
    const bool woken = changed_.wait_until(lock, deadline, [this] {
      return done_ || (!ended_ && NumInflight() < static_cast<size_t>(max_inflight_));
    });
    if (!woken) {
      return absl::DeadlineExceededError(absl::StrCat(
          "ForwardStream: ", NumInflight(), " requests in flight, the limit is ", max_inflight_,
          "; none was received within ", absl::FormatDuration(timeout)));
    }
    if (done_) return EndStatus();
    if (close_wanted_) return absl::FailedPreconditionError("ForwardStream: Send after CloseSend");
    if (!unanswered_.insert(request.request_id()).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "ForwardStream: request_id ", request.request_id(), " is in flight already"));
    }
    to_write_.push_back(std::move(request));
    WriteNext(lock);
    return absl::OkStatus();
  }

  void CloseSend() {
    std::unique_lock lock(mutex_);
    if (std::exchange(close_wanted_, true)) return;
    WriteNext(lock);
  }

  absl::StatusOr<std::optional<Answer>> Receive(absl::Duration timeout) {
    std::unique_lock lock(mutex_);
    const auto deadline = DeadlineAfter(timeout);
    const bool woken =
        changed_.wait_until(lock, deadline, [this] { return done_ || !answers_.empty(); });
    if (!woken) {
      return absl::DeadlineExceededError(absl::StrCat("ForwardStream: no answer within ",
                                                      absl::FormatDuration(timeout), ", ",
                                                      unanswered_.size(), " requests in flight"));
    }
    if (!answers_.empty()) {
      Answer answer = std::move(answers_.front());
      answers_.pop_front();
      changed_.notify_all();
      return std::optional<Answer>(std::move(answer));
    }
    if (final_.ok() && protocol_error_.ok() && close_wanted_ && unanswered_.empty()) {
      return std::optional<Answer>();
    }
    return EndStatus();
  }

  void OnReadDone(bool ok) override {
    std::unique_lock lock(mutex_);
    if (!ok) {
      ended_ = true;
      DropHoldIfIdle(lock);
      return;
    }
    if (unanswered_.erase(read_.request_id()) == 0) {
      protocol_error_ = absl::InternalError(absl::StrCat(
          "ForwardStream: the server answered request_id ", read_.request_id(), ", not in flight"));
      context_.TryCancel();
    } else {
      answers_.push_back(TakeAnswer());
      changed_.notify_all();
    }
    lock.unlock();
    StartRead(&read_);
  }

  void OnWriteDone(bool ok) override {
    std::unique_lock lock(mutex_);
    to_write_.pop_front();
    writing_ = false;
    write_failed_ = !ok;
    if (ended_) {
      DropHoldIfIdle(lock);
    } else {
      WriteNext(lock);
    }
  }

  void OnWritesDoneDone(bool) override {
    std::unique_lock lock(mutex_);
    writing_ = false;
    if (ended_) DropHoldIfIdle(lock);
  }

  void OnDone(const grpc::Status& status) override {
    std::lock_guard lock(mutex_);  // whoever sees done_ may destroy this object
    final_ = status;
    done_ = true;
    changed_.notify_all();
  }

 private:
  size_t NumInflight() const { return unanswered_.size() + answers_.size(); }

  // Starts what may be written next, if this thread can have the right to. Releases the lock.
  void WriteNext(std::unique_lock<std::mutex>& lock) {
    if (writing_ || ended_ || write_failed_) return;
    if (!to_write_.empty()) {
      writing_ = true;
      const v1::ForwardRequest* next = &to_write_.front();
      lock.unlock();
      StartWrite(next);
    } else if (close_wanted_ && !close_sent_) {
      writing_ = close_sent_ = true;
      lock.unlock();
      StartWritesDone();
    }
  }

  void DropHoldIfIdle(std::unique_lock<std::mutex>& lock) {
    if (writing_ || std::exchange(hold_dropped_, true)) return;
    lock.unlock();
    RemoveHold();
  }

  Answer TakeAnswer() {
    Answer answer;
    answer.request_id = read_.request_id();
    if (read_.has_error()) {
      const v1::RequestError& error = read_.error();
      answer.status = absl::Status(static_cast<absl::StatusCode>(error.code()), error.message());
      if (error.retry_pushback_ms() > 0) {
        SetRetryPushback(std::to_string(error.retry_pushback_ms()), &answer.status);
      }
    } else {
      answer.response = std::move(*read_.mutable_result());
    }
    return answer;
  }

  absl::Status EndStatus() const {
    if (!protocol_error_.ok()) return protocol_error_;
    if (!final_.ok()) {
      return absl::Status(static_cast<absl::StatusCode>(final_.error_code()),
                          final_.error_message());
    }
    return absl::UnavailableError(absl::StrCat("ForwardStream: the server ended the stream with ",
                                               unanswered_.size(), " requests unanswered"));
  }

  const std::unique_ptr<v1::ExpertService::Stub> stub_;
  const int max_inflight_;
  grpc::ClientContext context_;
  v1::ForwardStreamResponse read_;  // only the thread that runs OnReadDone

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<v1::ForwardRequest> to_write_;  // front: being written while writing_
  std::unordered_set<uint64_t> unanswered_;
  std::deque<Answer> answers_;
  absl::Status protocol_error_;
  grpc::Status final_;
  bool writing_ = false;
  bool write_failed_ = false;
  bool close_wanted_ = false;
  bool close_sent_ = false;
  bool ended_ = false;  // a read failed: nothing more comes
  bool hold_dropped_ = false;
  bool done_ = false;  // final_ is valid
};

ForwardStream::ForwardStream(std::shared_ptr<grpc::Channel> channel, int max_inflight)
    : reactor_(std::make_unique<Reactor>(std::move(channel), max_inflight)),
      max_inflight_(max_inflight) {
  reactor_->Start();
}

ForwardStream::~ForwardStream() {
  if (!reactor_->Cancel()) {
    (void)reactor_.release();  // better lost than destroyed under gRPC's hands
  }
}

absl::Status ForwardStream::Send(v1::ForwardRequest request, absl::Duration timeout) {
  return reactor_->Send(std::move(request), timeout);
}

void ForwardStream::CloseSend() { reactor_->CloseSend(); }

absl::StatusOr<std::optional<ForwardStream::Answer>> ForwardStream::Receive(
    absl::Duration timeout) {
  return reactor_->Receive(timeout);
}

}  // namespace expertd
