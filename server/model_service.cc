#include "server/model_service.h"

namespace expertd {
namespace {

grpc::ServerUnaryReactor* Ok(grpc::CallbackServerContext* context) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace

ModelServiceImpl::ModelServiceImpl(const ServedModel* model, const Placement* placement,
                                   const ServingState* state, v1::ServerInfo info)
    : model_(model), placement_(placement), state_(state), info_(std::move(info)) {}

void ModelServiceImpl::SetBackend(const std::string& detail,
                                  const std::vector<std::string>& devices, int64_t weight_bytes,
                                  int64_t workspace_bytes) {
  std::lock_guard lock(mutex_);
  info_.set_backend_detail(detail);
  info_.mutable_devices()->Assign(devices.begin(), devices.end());
  info_.set_weight_bytes(weight_bytes);
  info_.set_workspace_bytes(workspace_bytes);
}

grpc::ServerUnaryReactor* ModelServiceImpl::GetServerInfo(
    grpc::CallbackServerContext* context, const v1::GetServerInfoRequest* /*request*/,
    v1::ServerInfo* response) {
  {
    std::lock_guard lock(mutex_);
    *response = info_;
  }
  response->set_state(state_->state());
  return Ok(context);
}

grpc::ServerUnaryReactor* ModelServiceImpl::ListLayers(grpc::CallbackServerContext* context,
                                                       const v1::ListLayersRequest* /*request*/,
                                                       v1::ListLayersResponse* response) {
  for (const LayerSpec& layer : model_->layers) {
    v1::LayerInfo* info = response->add_layers();
    info->set_layer(layer.layer);
    info->set_hidden_size(static_cast<int32_t>(layer.hidden_size));
    info->set_intermediate_size(static_cast<int32_t>(layer.intermediate_size));
    info->set_num_experts(layer.num_experts);
    info->set_top_k(layer.top_k);
    info->set_recipe(layer.recipe == Recipe::kMxfp4 ? v1::RECIPE_MXFP4 : v1::RECIPE_NVFP4);
    info->set_swiglu_limit(layer.swiglu_limit);
  }
  return Ok(context);
}

grpc::ServerUnaryReactor* ModelServiceImpl::GetPlacement(grpc::CallbackServerContext* context,
                                                         const v1::GetPlacementRequest* /*request*/,
                                                         v1::GetPlacementResponse* response) {
  response->set_num_experts(placement_->num_experts());
  response->set_num_ranks(placement_->num_ranks());
  response->set_slots_per_rank(placement_->slots_per_rank());
  for (int32_t rank = 0; rank < placement_->num_ranks(); ++rank) {
    for (int32_t slot = 0; slot < placement_->slots_per_rank(); ++slot) {
      response->add_expert_of_slot(placement_->ExpertAt(rank, slot));
    }
  }
  return Ok(context);
}

grpc::ServerUnaryReactor* ModelServiceImpl::GetLoadProgress(
    grpc::CallbackServerContext* context, const v1::GetLoadProgressRequest* /*request*/,
    v1::LoadProgress* response) {
  *response = state_->progress();
  return Ok(context);
}

}  // namespace expertd
