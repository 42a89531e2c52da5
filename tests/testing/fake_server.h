#pragma once

#include <functional>
#include <memory>
#include <string>

#include "expertd/v1/expertd.grpc.pb.h"
#include "grpcpp/grpcpp.h"

// A gRPC server whose answers a test writes: what the client meets, without a model behind it.
namespace expertd::testing {

class FakeServer {
 public:
  using Stream = grpc::ServerReaderWriter<v1::ForwardStreamResponse, v1::ForwardRequest>;
  using ForwardHandler = std::function<grpc::Status(grpc::ServerContext*, const v1::ForwardRequest&,
                                                    v1::ForwardResponse*)>;
  using StreamHandler = std::function<grpc::Status(grpc::ServerContext*, Stream*)>;

  // Listens on a free port of 127.0.0.1 until destroyed. Handlers are set before the first call,
  // may be null (UNIMPLEMENTED) and run on gRPC's threads.
  FakeServer();
  ~FakeServer();

  const std::string& address() const { return address_; }
  void SetHealthy(const std::string& service, bool healthy);
  // Ends every connection at once.
  void Kill();

  v1::ServerInfo info;
  v1::ListLayersResponse layers;
  ForwardHandler forward;
  StreamHandler stream;

 private:
  class Expert;
  class Model;

  std::unique_ptr<Expert> expert_;
  std::unique_ptr<Model> model_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// The answer of the right size, all zeros.
v1::ForwardResponse ZeroAnswer(const v1::ForwardRequest& request);

// Layer 0: H 64, I 32, E 8, K 2.
v1::LayerInfo SmallLayer();

}  // namespace expertd::testing
