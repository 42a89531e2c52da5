#pragma once

#include <map>
#include <mutex>
#include <set>
#include <string>

#include "grpc/health/v1/health.grpc.pb.h"

namespace expertd {

// grpc.health.v1 for a fixed set of names. Any thread.
class HealthService final : public grpc::health::v1::Health::CallbackService {
 public:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;

  // names: all NOT_SERVING at first.
  explicit HealthService(const std::set<std::string>& names);
  ~HealthService() override;

  void Set(const std::string& name, Status status);
  // Every name NOT_SERVING for good; the watchers hear it and their streams end.
  void Shutdown();

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const grpc::health::v1::HealthCheckRequest* request,
                                  grpc::health::v1::HealthCheckResponse* response) override;
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* context,
      const grpc::health::v1::HealthCheckRequest* request) override;

 private:
  class Watcher;

  Status Get(const std::string& name) const;  // needs mutex_; SERVICE_UNKNOWN
  void Forget(Watcher* watcher);

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<std::string, Status> statuses_;
  std::set<Watcher*> watchers_;
  bool shut_down_ = false;
};

}  // namespace expertd
