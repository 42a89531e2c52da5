#include "tests/testing/fake_server.h"

#include <chrono>

#include "config/check.h"
#include "grpcpp/health_check_service_interface.h"

namespace expertd::testing {

class FakeServer::Expert : public v1::ExpertService::Service {
 public:
  explicit Expert(FakeServer* owner) : owner_(owner) {}

  grpc::Status Forward(grpc::ServerContext* context, const v1::ForwardRequest* request,
                       v1::ForwardResponse* response) override {
    if (!owner_->forward) return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no handler");
    return owner_->forward(context, *request, response);
  }

  grpc::Status ForwardStream(grpc::ServerContext* context, Stream* stream) override {
    if (!owner_->stream) return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no handler");
    return owner_->stream(context, stream);
  }

 private:
  FakeServer* const owner_;
};

class FakeServer::Model : public v1::ModelService::Service {
 public:
  explicit Model(FakeServer* owner) : owner_(owner) {}

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::ServerInfo* response) override {
    *response = owner_->info;
    return grpc::Status::OK;
  }

  grpc::Status ListLayers(grpc::ServerContext*, const v1::ListLayersRequest*,
                          v1::ListLayersResponse* response) override {
    *response = owner_->layers;
    return grpc::Status::OK;
  }

 private:
  FakeServer* const owner_;
};

FakeServer::FakeServer()
    : expert_(std::make_unique<Expert>(this)), model_(std::make_unique<Model>(this)) {
  info.set_max_message_bytes(32 << 20);
  info.set_max_stream_inflight(16);
  *layers.add_layers() = SmallLayer();
  grpc::EnableDefaultHealthCheckService(true);
  int port = 0;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(expert_.get());
  builder.RegisterService(model_.get());
  server_ = builder.BuildAndStart();
  EXPERTD_CHECK(server_ != nullptr);
  address_ = "127.0.0.1:" + std::to_string(port);
}

FakeServer::~FakeServer() { Kill(); }

void FakeServer::SetHealthy(const std::string& service, bool healthy) {
  server_->GetHealthCheckService()->SetServingStatus(service, healthy);
}

void FakeServer::Kill() { server_->Shutdown(std::chrono::system_clock::now()); }

v1::ForwardResponse ZeroAnswer(const v1::ForwardRequest& request) {
  v1::ForwardResponse response;
  response.set_request_id(request.request_id());
  response.set_num_tokens(request.num_tokens());
  response.set_hidden_size(request.hidden_size());
  response.set_output_dtype(request.output_dtype());
  response.set_output(std::string(request.hidden_states().size(), '\0'));
  response.mutable_timing()->set_kernel_us(7);
  response.mutable_timing()->set_step_tokens(request.num_tokens());
  return response;
}

v1::LayerInfo SmallLayer() {
  v1::LayerInfo layer;
  layer.set_hidden_size(64);
  layer.set_intermediate_size(32);
  layer.set_num_experts(8);
  layer.set_top_k(2);
  layer.set_recipe(v1::RECIPE_MXFP4);
  return layer;
}

}  // namespace expertd::testing
