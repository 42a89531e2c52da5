#include "server/listener.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "config/limits.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"

namespace expertd {
namespace {

struct HostPort {
  std::string host;
  std::string port;
};

// "[::1]:80" and "host:80".
HostPort Split(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return {address, ""};
  std::string host = address.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return {host, address.substr(colon + 1)};
}

// gRPC only says that it failed. Trying the same with plain sockets finds the reason.
std::string WhyNot(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) return "the path is in use or cannot be created";
  const HostPort parts = Split(address);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int resolved = getaddrinfo(parts.host.c_str(), parts.port.c_str(), &hints, &found);
  if (resolved != 0) return gai_strerror(resolved);
  std::string reason = "unknown reason";
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    const int descriptor = socket(one->ai_family, one->ai_socktype, one->ai_protocol);
    if (descriptor < 0) continue;
    if (bind(descriptor, one->ai_addr, one->ai_addrlen) != 0 || listen(descriptor, 1) != 0) {
      reason = std::strerror(errno);
    }
    close(descriptor);
  }
  freeaddrinfo(found);
  return reason;
}

void SetTransport(grpc::ServerBuilder& builder, int64_t max_message_bytes) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT,
                             0);  // a second daemon must not share the port
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, limits::kMaxConcurrentStreams);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, limits::kHttp2FrameBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             static_cast<int>(limits::kClientKeepaliveMinMs));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A client whose host vanished is noticed, and its queue entries freed.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS,
                             static_cast<int>(limits::kServerKeepaliveMs));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             static_cast<int>(limits::kServerKeepaliveTimeoutMs));
}

}  // namespace

absl::StatusOr<Listening> Listen(const std::string& address, int64_t max_message_bytes,
                                 int64_t max_received_bytes,
                                 const std::vector<grpc::Service*>& services) {
  // Adds itself to every builder made after the first call.
  static const bool reflection = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  static_cast<void>(reflection);

  grpc::ServerBuilder builder;
  SetTransport(builder, max_message_bytes);
  builder.SetResourceQuota(
      grpc::ResourceQuota("received").Resize(static_cast<size_t>(max_received_bytes)));
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  for (grpc::Service* service : services) builder.RegisterService(service);
  Listening listening;
  listening.server = builder.BuildAndStart();
  if (listening.server == nullptr || port <= 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, ": ", WhyNot(address)));
  }
  listening.address = absl::StartsWith(address, "unix:")
                          ? address
                          : absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
  return listening;
}

}  // namespace expertd
