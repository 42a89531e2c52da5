#include "server/status_map.h"

#include <string>

#include "server/pushback.h"

namespace expertd {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

void AddPushback(const absl::Status& status, grpc::CallbackServerContext* context) {
  const int64_t milliseconds = PushbackMs(status);
  if (milliseconds > 0) {
    context->AddTrailingMetadata("grpc-retry-pushback-ms", std::to_string(milliseconds));
  }
}

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const std::chrono::system_clock::time_point deadline = context.deadline();
  return deadline == std::chrono::system_clock::time_point::max() ? absl::InfiniteFuture()
                                                                  : absl::FromChrono(deadline);
}

}  // namespace expertd
