#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"

namespace expertd {

struct Listening {
  std::unique_ptr<grpc::Server> server;
  std::string address;  // as bound: port 0 is replaced
};

// Starts a gRPC server for `services` (they outlive it) with reflection at HOST:PORT or unix:PATH.
// Messages above `max_message_bytes` are answered RESOURCE_EXHAUSTED by gRPC, and so are calls once
// all connections together hold more than `max_received_bytes` that no handler has seen yet.
// UNAVAILABLE says why the address cannot be used.
absl::StatusOr<Listening> Listen(const std::string& address, int64_t max_message_bytes,
                                 int64_t max_received_bytes,
                                 const std::vector<grpc::Service*>& services);

}  // namespace expertd
