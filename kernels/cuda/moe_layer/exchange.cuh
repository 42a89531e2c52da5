#pragma once

#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/moe_layer/record.cuh"
#include "kernels/cuda/ptx/memory.cuh"

// Addresses of the exchange: where `from` writes on `to`, in the mapping of `to`'s workspace. The
// writer calls them with `from` = itself, the reader with `to` = itself; token rows go to oneself
// too. What a peer may write a step ahead has two buffers.
namespace expertd::cuda::moe_layer {

template <typename T>
__device__ __forceinline__ T* peer_region(const MoeLayerParams& params, int64_t region,
                                          int64_t elements, int buffer, int from, int to) {
  const int block = buffer * (params.peers.num_ranks - 1) + layout::PeerIndex(from, to);
  return params.peers.at<T>(to, region) + block * elements;
}

__device__ __forceinline__ int step_buffer(const MoeLayerParams& params) {
  return static_cast<int>(params.step & 1u);
}

// [1 + T K], a header first.
__device__ __forceinline__ layout::RouteRecord* route_records(const MoeLayerParams& params,
                                                              int from, int to) {
  return peer_region<layout::RouteRecord>(params, params.workspace.route_records,
                                          1 + params.workspace.rank_routes, step_buffer(params),
                                          from, to);
}
__device__ __forceinline__ void store_route(layout::RouteRecord* to,
                                            const layout::RouteRecord& record) {
  store_record(to, make_uint4(static_cast<uint32_t>(record.expert), __float_as_uint(record.weight),
                              static_cast<uint32_t>(record.row), record.step));
}
__device__ __forceinline__ layout::RouteRecord load_route(const layout::RouteRecord* from) {
  const uint4 words = load_record(from);
  return {static_cast<int32_t>(words.x), __uint_as_float(words.y), static_cast<int32_t>(words.z),
          words.w};
}
// Route `route` of a peer's, after routing has waited for it. It may have been another CTA that
// found the step in the record (shared sort): the meeting of the CTAs lies between, and who looks
// behind it cannot find an older record than was seen before it. Who gave up may find an older one:
// then the route is nobody's.
__device__ __forceinline__ layout::RouteRecord route_record(const MoeLayerParams& params,
                                                            int source, int route) {
  layout::RouteRecord record =
      load_route(route_records(params, source, params.peers.rank) + 1 + route);
  if (record.step != params.step) record.expert = -1;
  return record;
}
// Weight of route `route` of a rank's tokens, likewise.
__device__ __forceinline__ float route_weight(const MoeLayerParams& params, int source, int route) {
  return source == params.peers.rank ? __ldcg(params.weights + route)
                                     : route_record(params, source, route).weight;
}

// Index of a rank's first token among those of all ranks in this step's buffer.
__device__ __forceinline__ int64_t first_token(const MoeLayerParams& params, int from) {
  const int block = step_buffer(params) * params.peers.num_ranks + from;
  return int64_t{block} * params.workspace.max_tokens;
}
__device__ __forceinline__ uint32_t* token_flags(const MoeLayerParams& params, int from, int to) {
  return params.peers.at<uint32_t>(to, params.workspace.token_flags) + first_token(params, from);
}
// Of a token's row, H BF16: bytes into the workspace of each rank that it goes to.
__device__ __forceinline__ int64_t token_row_offset(const MoeLayerParams& params, int from,
                                                    int token) {
  return params.workspace.tokens + (first_token(params, from) + token) * params.hidden * 2;
}

// Global slot of a route: which replica is a function of the expert and the row's index in its
// request only. `expert` >= 0. Mostly an expert has one slot, and so have those before it: that one
// is loaded on trust, beside what says so.
__device__ __forceinline__ int placed_slot(const MoeLayerParams& params, int expert, int row) {
  int slot = params.slots[expert];
  int place = params.first_slot[expert];
  const int count = params.first_slot[expert + 1] - place;
  if (count != 1) [[unlikely]]
    place += row % count;
  if (place != expert) slot = params.slots[place];
  return slot;
}
__device__ __forceinline__ int row_in_request(const MoeLayerParams& params, int token) {
  return params.row_in_request ? params.row_in_request[token] : token;
}

}  // namespace expertd::cuda::moe_layer
