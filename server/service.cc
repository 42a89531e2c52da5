#include "server/service.h"

#include <atomic>
#include <memory>

#include "absl/time/clock.h"
#include "server/encode.h"
#include "server/status_map.h"
#include "server/stream_reactor.h"

namespace expertd {
namespace {

// One unary Forward. The call answers from the engine's thread or, refused, from gRPC's; gRPC
// deletes the reactor (OnDone) after that, and keeps request and response until then.
class ForwardReactor final : public grpc::ServerUnaryReactor {
 public:
  ForwardReactor(const ServiceContext& service, grpc::CallbackServerContext* context,
                 const v1::ForwardRequest* request, v1::ForwardResponse* response)
      : service_(service), context_(context), request_(request), response_(response) {
    const absl::Status ready = service_.state->Ready();
    if (!ready.ok()) {
      End(ready);
      return;
    }
    const absl::StatusOr<RequestView> view = Validate(*request_, *service_.model);
    if (!view.ok()) {
      End(view.status());
      return;
    }
    submitted_at_ = absl::Now();
    call_ = std::make_shared<Call>(*view, DeadlineOf(*context_), [this](const Answer& answer) {
      if (answer.status.ok()) {
        EncodeAnswer(answer, call_->view, request_->request_id(), received_at_, submitted_at_,
                     response_);
      }
      End(answer.status);
    });
    service_.engine->Submit(call_);
  }

  void OnCancel() override {
    if (call_ != nullptr) service_.engine->Cancel(*call_);
  }
  void OnDone() override { delete this; }

 private:
  void End(const absl::Status& status) {
    service_.metrics->RequestAnswered(status.code());
    AddPushback(status, context_);
    Finish(ToGrpc(status));
  }

  const ServiceContext& service_;
  grpc::CallbackServerContext* const context_;
  const v1::ForwardRequest* const request_;
  v1::ForwardResponse* const response_;
  const absl::Time received_at_ = absl::Now();
  absl::Time submitted_at_;
  std::shared_ptr<Call> call_;
};

class SelfTestReactor final : public grpc::ServerUnaryReactor {
 public:
  SelfTestReactor(const ServiceContext& service, grpc::CallbackServerContext* context,
                  const v1::SelfTestRequest* request, v1::SelfTestResponse* response)
      : context_(context) {
    absl::Status status = service.state->Ready();
    if (status.ok()) {
      status =
          service.self_tester->Start(*request, DeadlineOf(*context), cancelled_,
                                     [this, response](absl::StatusOr<v1::SelfTestResponse> result) {
                                       if (result.ok()) *response = *std::move(result);
                                       End(result.status());
                                     });
    }
    if (!status.ok()) End(status);
  }

  void OnCancel() override { cancelled_->store(true); }
  void OnDone() override { delete this; }

 private:
  void End(const absl::Status& status) {
    AddPushback(status, context_);
    Finish(ToGrpc(status));
  }

  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

grpc::ServerUnaryReactor* ExpertServiceImpl::Forward(grpc::CallbackServerContext* context,
                                                     const v1::ForwardRequest* request,
                                                     v1::ForwardResponse* response) {
  return new ForwardReactor(context_, context, request, response);
}

grpc::ServerBidiReactor<v1::ForwardRequest, v1::ForwardStreamResponse>*
ExpertServiceImpl::ForwardStream(grpc::CallbackServerContext* context) {
  auto* stream = new StreamReactor(this, context_, DeadlineOf(*context));
  std::lock_guard lock(mutex_);
  streams_.insert(stream);
  if (draining_) stream->Drain();
  return stream;
}

grpc::ServerUnaryReactor* ExpertServiceImpl::SelfTest(grpc::CallbackServerContext* context,
                                                      const v1::SelfTestRequest* request,
                                                      v1::SelfTestResponse* response) {
  return new SelfTestReactor(context_, context, request, response);
}

void ExpertServiceImpl::DrainStreams() {
  std::lock_guard lock(mutex_);
  draining_ = true;
  // A stream that ends meanwhile waits in Forget until this is done.
  for (StreamReactor* stream : streams_) stream->Drain();
}

void ExpertServiceImpl::Forget(StreamReactor* stream) {
  std::lock_guard lock(mutex_);
  streams_.erase(stream);
}

}  // namespace expertd
