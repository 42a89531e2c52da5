#include "server/health.h"

namespace expertd {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// One Watch stream. At most one write is under way; a change during it is sent after it, and only
// the newest: a slow watcher misses states in between but never the last.
class HealthService::Watcher final : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  Watcher(HealthService* service, std::string name) : service_(service), name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  void Tell(Status status, bool is_last) {
    std::unique_lock lock(mutex_);
    next_ = status;
    has_next_ = true;
    last_ = last_ || is_last;
    Advance(lock);
  }

  void OnWriteDone(bool ok) override {
    std::unique_lock lock(mutex_);
    writing_ = false;
    if (!ok) last_ = true;
    if (!ok) has_next_ = false;
    Advance(lock);
  }

  void OnCancel() override {
    std::unique_lock lock(mutex_);
    last_ = true;
    has_next_ = false;
    Advance(lock);
  }

  void OnDone() override {
    service_->Forget(this);
    delete this;
  }

 private:
  // Unlocks before it calls gRPC: after Finish this object may be gone.
  void Advance(std::unique_lock<std::mutex>& lock) {
    if (writing_ || finished_) return;
    if (has_next_ && (!has_sent_ || next_ != response_.status())) {
      writing_ = has_sent_ = true;
      has_next_ = false;
      response_.set_status(next_);
      lock.unlock();
      StartWrite(&response_);
    } else if (last_) {
      finished_ = true;
      lock.unlock();
      Finish(grpc::Status::OK);
    }
  }

  HealthService* const service_;
  const std::string name_;
  std::mutex mutex_;
  // Guarded by mutex_.
  HealthCheckResponse response_;
  Status next_ = HealthCheckResponse::UNKNOWN;
  bool has_next_ = false;
  bool has_sent_ = false;
  bool writing_ = false;
  bool last_ = false;
  bool finished_ = false;
};

HealthService::HealthService(const std::set<std::string>& names) {
  for (const std::string& name : names) statuses_[name] = HealthCheckResponse::NOT_SERVING;
}

HealthService::~HealthService() = default;

HealthService::Status HealthService::Get(const std::string& name) const {
  const auto found = statuses_.find(name);
  return found == statuses_.end() ? HealthCheckResponse::SERVICE_UNKNOWN : found->second;
}

void HealthService::Set(const std::string& name, Status status) {
  std::lock_guard lock(mutex_);
  if (shut_down_) return;
  statuses_[name] = status;
  for (Watcher* watcher : watchers_) {
    if (watcher->name() == name) watcher->Tell(status, false);
  }
}

void HealthService::Shutdown() {
  std::lock_guard lock(mutex_);
  shut_down_ = true;
  for (auto& [name, status] : statuses_) status = HealthCheckResponse::NOT_SERVING;
  for (Watcher* watcher : watchers_) watcher->Tell(Get(watcher->name()), true);
}

void HealthService::Forget(Watcher* watcher) {
  std::lock_guard lock(mutex_);
  watchers_.erase(watcher);
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  Status status;
  {
    std::lock_guard lock(mutex_);
    status = Get(request->service());
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (status == HealthCheckResponse::SERVICE_UNKNOWN) {
    reactor->Finish(
        grpc::Status(grpc::StatusCode::NOT_FOUND,
                     "service: found \"" + request->service() + "\", which is not served here"));
  } else {
    response->set_status(status);
    reactor->Finish(grpc::Status::OK);
  }
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(
    grpc::CallbackServerContext* /*context*/, const HealthCheckRequest* request) {
  auto* watcher = new Watcher(this, request->service());
  std::lock_guard lock(mutex_);
  watchers_.insert(watcher);
  watcher->Tell(Get(watcher->name()), shut_down_);
  return watcher;
}

}  // namespace expertd
