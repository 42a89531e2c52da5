#pragma once

#include <chrono>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"

namespace expertd {

// The same code and message; gRPC's codes have the same numbers.
grpc::Status ToGrpc(const absl::Status& status);

// The trailer grpc-retry-pushback-ms, if the status advises one. Before Finish.
void AddPushback(const absl::Status& status, grpc::CallbackServerContext* context);

// absl::InfiniteFuture() if the caller set none.
absl::Time DeadlineOf(const grpc::CallbackServerContext& context);

}  // namespace expertd
