#include "kernels/cuda/moe_layer/launch_params.h"

#include <algorithm>
#include <limits>

#include "kernels/cuda/moe_layer/traits.h"

namespace expertd::cuda::moe_layer {

MoeLayerParams CompleteParams(MoeLayerParams params, layout::WeightFormat format,
                              const KernelConfig& config) {
  char* base = params.peers.at<char>(params.peers.rank, 0);
  const layout::WorkspaceOffsets& offsets = params.workspace;
  params.local.head = reinterpret_cast<layout::WorkspaceHead*>(base + offsets.head);
  params.local.routes = reinterpret_cast<uint32_t*>(base + offsets.routes);
  params.local.route_slots = reinterpret_cast<uint16_t*>(base + offsets.route_slots);
  params.local.sort_counts = reinterpret_cast<uint32_t*>(base + offsets.sort_counts);
  params.local.sort_flags = reinterpret_cast<uint32_t*>(base + offsets.sort_flags);
  params.local.max_routes = offsets.max_routes;
  params.local.own_routes = offsets.own_routes;
  params.local.fc1_done = reinterpret_cast<uint32_t*>(base + offsets.fc1_done);
  params.local.fc2_done = reinterpret_cast<uint32_t*>(base + offsets.fc2_done);
  params.local.h = reinterpret_cast<uint16_t*>(base + offsets.h);
  params.local.y = reinterpret_cast<uint16_t*>(base + offsets.y);
  const int64_t rows = int64_t{params.peers.num_ranks} * offsets.max_tokens;
  params.local.tokens = reinterpret_cast<const uint16_t*>(base + offsets.tokens) +
                        (params.step & 1u) * rows * params.hidden;
  params.local.fc1_done_stride = layout::DoneStride(2 * params.intermediate);
  params.local.fc2_done_stride = layout::DoneStride(params.hidden);
  params.token_tile = config.token_tile;
  params.num_stages = config.num_stages;
  const int weight_bytes = WeightStageBytes(format);
  const int token_bytes = TokenStageBytes(config.token_tile);
  const bool one_ring = HasOneRing(config.token_tile);
  params.token_stride = one_ring ? weight_bytes + token_bytes : token_bytes;
  params.tokens_offset = kStateBytes + (one_ring ? 1 : config.num_stages) * weight_bytes;
  params.tables_offset = kStateBytes + config.num_stages * (weight_bytes + token_bytes);
  params.list_offset = params.tables_offset + 2 * (params.num_slots + 1) * sizeof(uint32_t);
  params.near_routes = std::min(config.near_routes, params.own_sort_routes);
  if (!(params.swiglu_limit > 0)) params.swiglu_limit = std::numeric_limits<float>::infinity();
  params.schedule = ScheduleShape(params.num_slots, params.intermediate / 32, params.hidden / 64,
                                  config.num_ctas, params.peers.num_ranks > 1);
  params.by_top_k = Divisor(static_cast<uint32_t>(params.top_k));
  params.by_slots_per_rank = Divisor(static_cast<uint32_t>(params.slots_per_rank));
  params.by_ctas = Divisor(static_cast<uint32_t>(config.num_ctas));
  params.by_token_tile = Divisor(static_cast<uint32_t>(config.token_tile));
  const int64_t x_bytes = int64_t{params.num_tokens} * params.hidden * 2;
  if (x_bytes <= kMaxPrefetchedTokenBytes) {
    params.x_share = static_cast<int32_t>((x_bytes / config.num_ctas + 128) / 128 * 128);
  }
  return params;
}

}  // namespace expertd::cuda::moe_layer
