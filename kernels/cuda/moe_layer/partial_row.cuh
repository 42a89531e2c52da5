#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/moe_layer/cta_share.cuh"
#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"

// What this rank's experts add to one token: a partial row, by a warp, 256 columns at a time.
namespace expertd::cuda::moe_layer {

struct PartialRow {
  using Columns = float[8];  // a lane's, neighbours

  const MoeLayerParams& params;
  int lane;
  // Of the parameters what every slice needs.
  int hidden;
  bool as_bf16;
  const uint16_t* y;

  __device__ __forceinline__ PartialRow(const MoeLayerParams& p, int l)
      : params(p), lane(l), hidden(p.hidden), as_bf16(p.partials_bf16 != 0), y(p.local.y) {}

  // 256 columns of a token, fewer at the row's end.
  struct Slice {
    int token;
    int column;       // of the row, this lane's first
    int64_t element;  // of [T][H], where the slice begins
    bool inside;      // whether the lane has columns
  };
  __device__ __forceinline__ Slice slice_of(int token, int index) const {
    Slice slice;
    slice.token = token;
    const int begin = index * layout::kPartialColumns;
    slice.column = begin + lane * 8;
    slice.element = int64_t{slice.token} * hidden + begin;
    slice.inside = is_inside(index);
    return slice;
  }
  __device__ __forceinline__ bool is_inside(int index) const {
    return index * layout::kPartialColumns + lane * 8 < hidden;
  }

  // A token's routes: lane k holds route k's weight.
  struct TokenRoutes {
    uint32_t here = 0;    // routes that this rank computes
    uint32_t owners = 0;  // ranks that compute a route
    int slot = 0;         // lane k: of this rank, if it computes route k
    float weight = 0;
    uint32_t first_route = 0;
  };

  // What the lanes load for it.
  struct RouteWords {
    uint32_t slot = layout::kNowhere;
    float weight = 0;
    uint32_t first_route = 0;
  };
  __device__ __forceinline__ RouteWords load_routes(int source, int token) const {
    const Sources& sources = shared_state().sources;
    const int top_k = sources.top_k[source];
    const int in_source = token * top_k + lane;
    RouteWords words;
    words.first_route = sources.first_route[source] + token * top_k;
    if (lane < top_k) {
      words.slot = route_slots(params)[words.first_route + lane];
      words.weight = route_weight(params, source, in_source);
    }
    return words;
  }
  __device__ __forceinline__ TokenRoutes resolve(const RouteWords& words) const {
    const uint32_t owner = params.by_slots_per_rank.Quotient(words.slot);
    const bool somewhere = words.slot != layout::kNowhere;
    const bool here = somewhere && owner == static_cast<uint32_t>(params.peers.rank);
    TokenRoutes routes;
    routes.slot = static_cast<int>(words.slot) - params.peers.rank * params.slots_per_rank;
    routes.weight = words.weight;
    routes.first_route = words.first_route;
    routes.here = __ballot_sync(0xffffffffu, here);
    routes.owners = __reduce_or_sync(0xffffffffu, somewhere ? 1u << owner : 0);
    return routes;
  }
  __device__ __forceinline__ TokenRoutes routes_of(int source, int token) const {
    return resolve(load_routes(source, token));
  }

  __device__ __forceinline__ static void add(float (&sum)[8], const uint4& row, float weight) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += weight * __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
    }
  }

  __device__ __forceinline__ static uint4 pack(const float (&values)[8]) {
    return make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                      pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]));
  }

  // sum += what this rank's routes add to a slice, route after route; kRowsAtOnce are loaded at
  // once.
  template <int kRowsAtOnce>
  __device__ __forceinline__ void add_up(const TokenRoutes& routes, const Slice& slice,
                                         Columns& sum) const {
    const uint16_t* from = y + int64_t{routes.first_route} * hidden + slice.column;
#pragma unroll 1
    for (uint32_t left = routes.here; left != 0;) {
      uint4 rows[kRowsAtOnce];
      uint32_t taken = left;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int k = __ffs(taken) - 1;
        taken &= taken - 1;
        if (k >= 0 && slice.inside) {
          rows[i] = __ldcg(reinterpret_cast<const uint4*>(from + int64_t{k} * hidden));
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (left == 0) continue;
        const float weight = __shfl_sync(0xffffffffu, routes.weight, __ffs(left) - 1);
        left &= left - 1;
        if (slice.inside) add(sum, rows[i], weight);
      }
    }
  }

  // The same of two neighbouring slices of one token, of which `count` are asked for. Fewer
  // instructions a slice than one by one.
  template <int kRoutesAtOnce>
  __device__ __forceinline__ void add_up_two(const TokenRoutes& routes, int column, int count,
                                             Columns (&sums)[2]) const {
    const uint16_t* from = y + int64_t{routes.first_route} * hidden + column;
    const bool first = column < hidden;
    const bool second = count > 1 && column + layout::kPartialColumns < hidden;
#pragma unroll 1
    for (uint32_t left = routes.here; left != 0;) {
      uint4 rows[kRoutesAtOnce][2];
      uint32_t taken = left;
#pragma unroll
      for (int i = 0; i < kRoutesAtOnce; ++i) {
        const int k = __ffs(taken) - 1;
        taken &= taken - 1;
        const uint4* at = reinterpret_cast<const uint4*>(from + k * hidden);
        if (k >= 0 && first) rows[i][0] = __ldcg(at);
        if (k >= 0 && second) rows[i][1] = __ldcg(at + layout::kPartialColumns / 8);
      }
#pragma unroll
      for (int i = 0; i < kRoutesAtOnce; ++i) {
        if (left == 0) continue;
        const float weight = __shfl_sync(0xffffffffu, routes.weight, __ffs(left) - 1);
        left &= left - 1;
        if (first) add(sums[0], rows[i][0], weight);
        if (second) add(sums[1], rows[i][1], weight);
      }
    }
  }
};

}  // namespace expertd::cuda::moe_layer
