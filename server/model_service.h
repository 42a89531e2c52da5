#pragma once

#include <memory>
#include <mutex>

#include "config/cluster_spec.h"
#include "expertd/v1/expertd.grpc.pb.h"
#include "server/serving_state.h"
#include "server/validate.h"

namespace expertd {

// expertd.v1.ModelService: what is served and how far loading is. Answers from memory at once.
class ModelServiceImpl final : public v1::ModelService::CallbackService {
 public:
  // `info`: everything but the state. All outlive it.
  ModelServiceImpl(const ServedModel* model, const Placement* placement, const ServingState* state,
                   v1::ServerInfo info);

  // Completes the info once the backend exists.
  void SetBackend(const std::string& detail, const std::vector<std::string>& devices,
                  int64_t weight_bytes, int64_t workspace_bytes);

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::ServerInfo* response) override;
  grpc::ServerUnaryReactor* ListLayers(grpc::CallbackServerContext* context,
                                       const v1::ListLayersRequest* request,
                                       v1::ListLayersResponse* response) override;
  grpc::ServerUnaryReactor* GetPlacement(grpc::CallbackServerContext* context,
                                         const v1::GetPlacementRequest* request,
                                         v1::GetPlacementResponse* response) override;
  grpc::ServerUnaryReactor* GetLoadProgress(grpc::CallbackServerContext* context,
                                            const v1::GetLoadProgressRequest* request,
                                            v1::LoadProgress* response) override;

 private:
  const ServedModel* const model_;
  const Placement* const placement_;
  const ServingState* const state_;
  std::mutex mutex_;
  v1::ServerInfo info_;  // guarded by mutex_
};

}  // namespace expertd
