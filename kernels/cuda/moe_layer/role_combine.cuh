#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// The weighted sum of each token's expert outputs, by the warps that multiplied, after the tile
// list. A warp takes runs of 256 columns of a token. First the tokens of peers: what this rank's
// experts add to them, one partial row a token, is stored to the rank that owns the token and
// flagged there. Then this rank's own tokens: the ranks' partial rows, this one's included, are
// added in rank order. A partial is the sum of a rank's routes in their order in f32. The split
// over warps does not change what is added to what, so the bits are fixed.
namespace expertd::cuda::moe_layer {

struct CombineRole {
  static constexpr int kColumns = layout::kPartialColumns;  // a lane has 8
  static constexpr int kRowsAtOnce = 8;
  static constexpr int kFlagsAtOnce = 4;  // one release covers the stores of so many items
  using Columns = float[8];

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;
  int lane;

  // A token's routes: lane k holds route k's weight.
  struct TokenRoutes {
    uint32_t here = 0;    // routes that this rank computes
    uint32_t owners = 0;  // ranks that compute a route
    float weight = 0;
    int64_t first_route = 0;
    int top_k = 0;
  };

  // Each warp looks at its share of the flags; a barrier joins the CTA's warps.
  __device__ __forceinline__ void wait_for_outputs() const {
    const int token_tiles = tile_begin(params)[params.num_slots];
    const int row_tiles = params.hidden / 64;
    const int quads = params.local.fc2_done_stride / 4;
    waiter.wait_for_ctas(kWaitFc2, blockIdx.x, [&] {
      uint32_t found = params.step;
      for (int i = warp * 32 + lane; i < token_tiles * quads; i += kExpertWarps * 32) {
        const uint4 flags = ptx::ld_relaxed_gpu_v4(params.local.fc2_done + 4 * i);
        const uint32_t words[4] = {flags.x, flags.y, flags.z, flags.w};
        const int first = 4 * (i % quads);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (first + c < row_tiles && words[c] != params.step) found = words[c];
        }
      }
      return found;
    });
    ptx::barrier_sync<kCombineBarrier>(kExpertWarps * 32);
  }

  __device__ __forceinline__ TokenRoutes routes_of(int source, int token) const {
    const Sources& sources = shared_state().sources;
    TokenRoutes routes;
    routes.top_k = sources.top_k[source];
    const int in_source = token * routes.top_k + lane;
    routes.first_route = int64_t{sources.first_route[source]} + token * routes.top_k;
    uint32_t owner = 0;  // 1 + rank
    if (lane < routes.top_k) owner = route_owners(params)[routes.first_route + lane];
    const bool here = owner == static_cast<uint32_t>(params.peers.rank) + 1;
    if (here) {
      routes.weight = source == params.peers.rank
                          ? params.weights[in_source]
                          : __ldcg(route_weights(params, source, params.peers.rank) + in_source);
    }
    routes.here = __ballot_sync(0xffffffffu, here);
    routes.owners = __reduce_or_sync(0xffffffffu, owner == 0 ? 0 : 1u << (owner - 1));
    return routes;
  }

  __device__ __forceinline__ static void add(Columns& sum, const uint4& row, float weight) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += weight * __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
    }
  }

  __device__ __forceinline__ static uint4 pack(const Columns& values) {
    return make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                      pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]));
  }

  // What this rank's routes add to a token's columns; on the wire's grid.
  __device__ __forceinline__ void add_up(const TokenRoutes& routes, int column,
                                         Columns& sum) const {
    const bool inside = column < params.hidden;
    const uint16_t* y = params.local.y + routes.first_route * params.hidden + column;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
    for (int base = 0; base < routes.top_k; base += kRowsAtOnce) {
      uint4 rows[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (inside && base + i < 32 && (routes.here >> (base + i) & 1u)) {
          rows[i] = __ldcg(reinterpret_cast<const uint4*>(y + int64_t{base + i} * params.hidden));
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const float w = __shfl_sync(0xffffffffu, routes.weight, (base + i) & 31);
        if (base + i < 32 && (routes.here >> (base + i) & 1u)) add(sum, rows[i], w);
      }
    }
  }

  __device__ __forceinline__ static void store_f32(float* to, const Columns& values) {
    reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
  }

  // --- tokens of peers

  __device__ __forceinline__ void store_partial(int home, int64_t element,
                                                const Columns& sum) const {
    if (params.partials_bf16) {
      uint16_t* to = partials<uint16_t>(params, params.peers.rank, home) + element;
      *reinterpret_cast<uint4*>(to) = pack(sum);
    } else {
      store_f32(partials<float>(params, params.peers.rank, home) + element, sum);
    }
  }

  // Items [begin, end) of (token of `home`, slice).
  __device__ __forceinline__ void return_run(int home, int begin, int end, int slices) const {
    uint32_t* flags = partial_flags(params, params.peers.rank, home);
    int known = -1;
    TokenRoutes routes;
    for (int first = begin; first < end; first += kFlagsAtOnce) {
      const int count = min(end - first, kFlagsAtOnce);
      uint32_t stored = 0;
      for (int i = 0; i < count; ++i) {
        const int token = (first + i) / slices;
        if (token != known) routes = routes_of(home, token);
        known = token;
        if (routes.here == 0) continue;
        const int column = (first + i - token * slices) * kColumns + lane * 8;
        Columns sum;
        add_up(routes, column, sum);
        if (column < params.hidden) {
          store_partial(home, int64_t{token} * params.hidden + column, sum);
        }
        stored |= 1u << i;
      }
      __syncwarp();
      if (stored >> lane & 1u) ptx::st_release_sys(flags + first + lane, params.step);
    }
  }

  // A run of all peers' items, in rank order, for each warp of the grid.
  __device__ __forceinline__ void return_partials(int slices) const {
    const int ranks = params.peers.num_ranks;
    if (ranks == 1 || waiter.gave_up() || params.stall == kStallPartials) return;
    const Sources& sources = shared_state().sources;
    int items = 0;
    for (int home = 0; home < ranks; ++home) {
      if (home != params.peers.rank) items += sources.num_tokens[home] * slices;
    }
    const int warps = gridDim.x * kExpertWarps;
    const int run_length = (items + warps - 1) / warps;
    int begin = (warp * gridDim.x + blockIdx.x) * run_length;  // of the run, from `home`'s first
    for (int home = 0; home < ranks; ++home) {
      if (home == params.peers.rank) continue;
      const int count = sources.num_tokens[home] * slices;
      return_run(home, max(begin, 0), min(begin + run_length, count), slices);
      begin -= count;
    }
  }

  // --- this rank's tokens

  __device__ __forceinline__ void load_partial(int owner, int64_t element, Columns& sum) const {
    if (params.partials_bf16) {
      const uint16_t* from = partials<uint16_t>(params, owner, params.peers.rank) + element;
      const uint4 row = __ldcg(reinterpret_cast<const uint4*>(from));
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
      add(sum, row, 1.0f);
    } else {
      const float4* from = reinterpret_cast<const float4*>(
          partials<float>(params, owner, params.peers.rank) + element);
      const float4 low = __ldcg(from);
      const float4 high = __ldcg(from + 1);
      sum[0] = low.x, sum[1] = low.y, sum[2] = low.z, sum[3] = low.w;
      sum[4] = high.x, sum[5] = high.y, sum[6] = high.z, sum[7] = high.w;
    }
  }

  // This rank's own partial is rounded as if it had crossed.
  __device__ __forceinline__ void own_partial(const TokenRoutes& routes, int column,
                                              Columns& sum) const {
    add_up(routes, column, sum);
    if (!params.partials_bf16 || params.peers.num_ranks == 1) return;
    const uint4 rounded = pack(sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
    add(sum, rounded, 1.0f);
  }

  __device__ __forceinline__ void wait_for_partial(int owner, int token, int item) const {
    const uint32_t* flag = partial_flags(params, owner, params.peers.rank) + item;
    (void)waiter.wait_for_peer({kWaitPartials, static_cast<uint32_t>(token), owner},
                               [&] { return ptx::ld_relaxed_sys(flag); });
  }

  __device__ __forceinline__ void combine(const TokenRoutes& routes, int token, int item,
                                          int column) const {
    const bool inside = column < params.hidden;
    const int64_t element = int64_t{token} * params.hidden + column;
    Columns total = {};
    for (uint32_t left = routes.owners; left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      Columns sum = {};
      if (owner == params.peers.rank) {
        own_partial(routes, column, sum);
      } else {
        wait_for_partial(owner, token, item);
        if (inside) load_partial(owner, element, sum);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) total[i] += sum[i];
    }
    if (inside) store(total, element);
  }

  __device__ __forceinline__ void store(const Columns& sum, int64_t element) const {
    if (params.output_f32) {
      store_f32(static_cast<float*>(params.output) + element, sum);
    } else {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.output) + element) = pack(sum);
    }
  }

  // A run of items (token, slice) in token order for each warp of the grid.
  __device__ __forceinline__ void run() const {
    const int slices = layout::NumPartialSlices(params.hidden);
    wait_for_outputs();
    return_partials(slices);
    const int items = params.num_tokens * slices;
    const int warps = gridDim.x * kExpertWarps;
    const int run_length = (items + warps - 1) / warps;
    const int begin = (warp * gridDim.x + blockIdx.x) * run_length;
    const int end = min(begin + run_length, items);
    int known = -1;
    TokenRoutes routes;
    for (int item = begin; item < end && !waiter.gave_up(); ++item) {
      const int token = item / slices;
      if (token != known) routes = routes_of(params.peers.rank, token);
      known = token;
      combine(routes, token, item, (item - token * slices) * kColumns + lane * 8);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
