#pragma once

#include <cstdint>
#include <mutex>
#include <set>

#include "expertd/v1/expertd.grpc.pb.h"
#include "server/engine.h"
#include "server/metrics.h"
#include "server/self_test.h"
#include "server/serving_state.h"
#include "server/validate.h"

namespace expertd {

class StreamReactor;

// What requests meet on their way in. Owned by App, which outlives every call.
struct ServiceContext {
  const ServedModel* model = nullptr;
  ServingState* state = nullptr;
  Engine* engine = nullptr;
  Metrics* metrics = nullptr;
  SelfTester* self_tester = nullptr;
  int32_t max_stream_inflight = 0;
};

// expertd.v1.ExpertService: decodes, validates, submits; encodes what the engine answers. Its
// handlers run on gRPC's threads and never block.
class ExpertServiceImpl final : public v1::ExpertService::CallbackService {
 public:
  explicit ExpertServiceImpl(const ServiceContext& context) : context_(context) {}

  // Every stream ends once it has answered what it read, the present and the future ones.
  void DrainStreams();

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const v1::ForwardRequest* request,
                                    v1::ForwardResponse* response) override;
  grpc::ServerBidiReactor<v1::ForwardRequest, v1::ForwardStreamResponse>* ForwardStream(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* SelfTest(grpc::CallbackServerContext* context,
                                     const v1::SelfTestRequest* request,
                                     v1::SelfTestResponse* response) override;

 private:
  friend class StreamReactor;
  void Forget(StreamReactor* stream);

  const ServiceContext context_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::set<StreamReactor*> streams_;
  bool draining_ = false;
};

}  // namespace expertd
