#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "config/limits.h"
#include "expertd/v1/expertd.pb.h"

namespace grpc {
class Channel;
}

// A client of one expertd process: what `call`, `bench`, the tests and C++ users share.
//
// Errors are absl::Status with the server's code and message. UNAVAILABLE from a Client means
// either that the server said so (loading, draining, lost rank) or that the connection broke;
// IsReachable tells which. RetryPushback reads the server's advice out of a status.
namespace expertd {

struct ClientOptions {
  absl::Duration connect_timeout = absl::Seconds(5);
  bool wait_for_server = false;  // true: a refused connection is tried again until connect_timeout
};

struct CallOptions {
  absl::Duration timeout = absl::Seconds(10);     // of the whole call, attempts and pauses included
  int max_attempts = limits::kClientMaxAttempts;  // 1 = never retry
};

// How long the server asks to wait before a retry; nothing where it gave no advice, infinite where
// it asks for none.
std::optional<absl::Duration> RetryPushback(const absl::Status& status);

// Asks the health service until `service` ("" = the process, "expertd.v1.ExpertService" = weights
// loaded and ranks up) is SERVING. Needs no Client: the server may not listen yet. On timeout:
// UNAVAILABLE if nothing ever answered, FAILED_PRECONDITION naming the last state if something did.
// A timeout of zero asks once. Any thread.
absl::Status WaitUntilHealthy(const std::string& address, const std::string& service,
                              absl::Duration timeout);

class ForwardStream;

// Any number of threads may call at once. Every call blocks its thread until answered, failed or
// timed out. The connection is this Client's own (no two Clients share one) and closes with it;
// streams that it opened keep it alive. http_proxy variables are ignored.
class Client {
 public:
  // `address`: HOST:PORT or unix:PATH. Asks for ServerInfo and takes the receive cap from it:
  // gRPC's own default of 4 MB would refuse the answers to large batches.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& address,
                                                         const ClientOptions& options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // As of Connect.
  const v1::ServerInfo& info() const { return info_; }

  // Retries within the timeout: UNAVAILABLE after the server's pushback or a jittered back-off,
  // RESOURCE_EXHAUSTED only with a pushback. A pause that the deadline does not cover is not begun:
  // the last error is returned. `response` is overwritten; reusing it saves its allocation.
  absl::Status Forward(const v1::ForwardRequest& request, const CallOptions& options,
                       v1::ForwardResponse* response);

  // One attempt each.
  absl::StatusOr<v1::ServerInfo> GetServerInfo(absl::Duration timeout);
  absl::StatusOr<v1::ListLayersResponse> ListLayers(absl::Duration timeout);
  absl::StatusOr<v1::GetPlacementResponse> GetPlacement(absl::Duration timeout);
  absl::StatusOr<v1::LoadProgress> GetLoadProgress(absl::Duration timeout);
  absl::StatusOr<v1::SelfTestResponse> SelfTest(const v1::SelfTestRequest& request,
                                                absl::Duration timeout);

  // At most `max_inflight` requests unanswered, and never more than ServerInfo.max_stream_inflight.
  std::unique_ptr<ForwardStream> OpenStream(int max_inflight);

  // Whether the server answers anything at all within `timeout`.
  bool IsReachable(absl::Duration timeout);

 private:
  struct Stubs;
  Client(std::unique_ptr<Stubs> stubs, v1::ServerInfo info);

  std::unique_ptr<Stubs> stubs_;
  v1::ServerInfo info_;
};

// One ForwardStream call. One thread may Send while another Receives; two threads must not Send,
// nor Receive, at once. Memory is bounded by the in-flight limit: a slot is taken by Send and freed
// when Receive hands its answer out. There are no retries: an error item is an answer, its advice
// included. Destruction cancels what is unfinished and does not wait.
class ForwardStream {
 public:
  struct Answer {
    uint64_t request_id = 0;
    absl::Status status;           // the error item's, or OK
    v1::ForwardResponse response;  // if OK
  };

  // Cancels what is unanswered; waits, for no network, until gRPC has let go of the call. Not to be
  // destroyed by one of gRPC's own threads.
  ~ForwardStream();
  ForwardStream(const ForwardStream&) = delete;
  ForwardStream& operator=(const ForwardStream&) = delete;

  // Waits for a free slot, then hands the request over. request_id must differ from those in
  // flight. DEADLINE_EXCEEDED: no slot became free (the request was not sent). Other errors: the
  // stream ended.
  absl::Status Send(v1::ForwardRequest request, absl::Duration timeout);

  // No more requests; what is in flight is still answered.
  void CloseSend();

  // The next answer in completion order. Nothing: after CloseSend, all is answered and the server
  // ended the stream with OK. DEADLINE_EXCEEDED: no answer yet, the stream lives. Other errors: it
  // ended.
  absl::StatusOr<std::optional<Answer>> Receive(absl::Duration timeout);

  int max_inflight() const { return max_inflight_; }

 private:
  friend class Client;
  class Reactor;
  ForwardStream(std::shared_ptr<grpc::Channel> channel, int max_inflight);

  std::unique_ptr<Reactor> reactor_;
  int max_inflight_;
};

}  // namespace expertd
