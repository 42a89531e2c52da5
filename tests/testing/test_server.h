#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "expertd/v1/expertd.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/app.h"
#include "tests/testing/golden_vectors.h"
#include "tests/testing/held_backend.h"

namespace expertd {

// The real server on a free port, in this process, with the golden checkpoint "v4-mxfp4" (layers 0
// and 1, H 256, E 8), and stubs to talk to it.
class TestServer {
 public:
  static ServerConfig Config(int32_t ranks) {
    ServerConfig config;
    config.checkpoint = std::string(EXPERTD_TEST_VECTORS) + "/v4-mxfp4/checkpoint";
    config.model_name = "v4";
    config.listen = "127.0.0.1:0";
    config.ranks = ranks;
    config.threads = ranks;
    config.max_tokens_per_rank = 32;
    return config;
  }

  explicit TestServer(const ServerConfig& config, bool wait = true) {
    absl::StatusOr<std::unique_ptr<App>> opened = App::Open(config, Gated(gate));
    EXPERTD_CHECK(opened.ok());
    app = *std::move(opened);
    const absl::StatusOr<std::string> bound = app->Listen();
    EXPERTD_CHECK(bound.ok());
    address = *bound;
    if (wait) {
      app->StartLoading();
      EXPERTD_CHECK(app->WaitUntilServing(absl::Now() + absl::Seconds(30)).ok());
    }
    channel = NewChannel();
    experts = v1::ExpertService::NewStub(channel);
    models = v1::ModelService::NewStub(channel);
    health = grpc::health::v1::Health::NewStub(channel);
  }
  explicit TestServer(int32_t ranks = 2) : TestServer(Config(ranks)) {}
  ~TestServer() { gate->Release(); }

  std::shared_ptr<grpc::Channel> NewChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    arguments.SetMaxReceiveMessageSize(-1);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }

  grpc::Status Forward(const v1::ForwardRequest& request, v1::ForwardResponse* response) const {
    grpc::ClientContext context;
    Deadline(context);
    return experts->Forward(&context, request, response);
  }
  static void Deadline(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  template <typename Condition>
  static bool WaitFor(Condition condition) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!condition()) {
      if (absl::Now() > end) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  const std::shared_ptr<BackendGate> gate = std::make_shared<BackendGate>();
  std::unique_ptr<App> app;
  std::string address;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::ExpertService::Stub> experts;
  std::unique_ptr<v1::ModelService::Stub> models;
  std::unique_ptr<grpc::health::v1::Health::Stub> health;
};

// A valid request of T 2, K 2 for layer 0, as numbers.
inline v1::ForwardRequest SmallRequest(int32_t num_tokens = 2, int32_t layer = 0) {
  v1::ForwardRequest request;
  request.set_request_id(77);
  request.set_layer(layer);
  request.set_num_tokens(num_tokens);
  request.set_hidden_size(256);
  request.set_top_k(2);
  for (int i = 0; i < num_tokens * 256; ++i) {
    request.add_hidden_values(0.01f * static_cast<float>(i % 37) - 0.1f);
  }
  for (int i = 0; i < num_tokens * 2; ++i) {
    request.add_expert_id_values((i * 3 + 1) % 8);
    request.add_routing_weight_values(0.5f);
  }
  return request;
}

// A golden request as a program sends it.
inline v1::ForwardRequest ToMessage(const testing::GoldenRequest& golden, int64_t hidden_size) {
  const auto bytes = [](const auto& values) {
    return std::string(reinterpret_cast<const char*>(values.data()),
                       values.size() * sizeof(values[0]));
  };
  v1::ForwardRequest request;
  request.set_layer(golden.layer);
  request.set_num_tokens(golden.num_tokens);
  request.set_hidden_size(static_cast<int32_t>(hidden_size));
  request.set_top_k(golden.top_k);
  request.set_hidden_states(bytes(golden.hidden));
  request.set_expert_ids(bytes(golden.ids));
  request.set_routing_weights(bytes(golden.weights));
  return request;
}

// A unary Forward under way on a thread.
class AsyncForward {
 public:
  AsyncForward(const TestServer& server, v1::ForwardRequest request,
               std::chrono::milliseconds timeout = std::chrono::seconds(20))
      : request_(std::move(request)) {
    context_.set_deadline(std::chrono::system_clock::now() + timeout);
    thread_ = std::thread(
        [this, &server] { status_ = server.experts->Forward(&context_, request_, &response_); });
  }
  ~AsyncForward() {
    if (thread_.joinable()) Wait();
  }

  void Cancel() { context_.TryCancel(); }
  grpc::Status Wait() {
    thread_.join();
    return status_;
  }
  const v1::ForwardResponse& response() const { return response_; }  // after Wait
  const grpc::ClientContext& context() const { return context_; }

 private:
  const v1::ForwardRequest request_;
  grpc::ClientContext context_;
  v1::ForwardResponse response_;
  grpc::Status status_;
  std::thread thread_;
};

}  // namespace expertd
