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

  // 256 columns of a token, fewer at the row's end.
  struct Slice {
    int token;
    int column;       // of the row, where the slice begins
    int width;        // columns
    int lane_column;  // of the row, first of this lane's 8
    bool inside;      // whether the lane has columns
  };
  __device__ __forceinline__ Slice slice_at(int item, int slices) const {
    Slice slice;
    slice.token = item / slices;
    slice.column = (item - slice.token * slices) * kColumns;
    slice.width = min(kColumns, params.hidden - slice.column);
    slice.lane_column = slice.column + lane * 8;
    slice.inside = lane * 8 < slice.width;
    return slice;
  }

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

  // What this rank's routes add to a slice.
  __device__ __forceinline__ void add_up(const TokenRoutes& routes, const Slice& slice,
                                         Columns& sum) const {
    const bool inside = slice.inside;
    const uint16_t* y = params.local.y + routes.first_route * params.hidden + slice.lane_column;
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

  // --- tokens of peers

  // A slice crosses as BF16 in the order of its columns, or as F32 in two halves: the first four
  // columns of every lane, then the others. Each store of a warp is one piece that way.
  __device__ __forceinline__ void store_partial(int home, const Slice& slice,
                                                const Columns& sum) const {
    const int64_t element = int64_t{slice.token} * params.hidden + slice.column;
    if (params.partials_bf16) {
      uint16_t* to = partials<uint16_t>(params, params.peers.rank, home) + element + lane * 8;
      *reinterpret_cast<uint4*>(to) = pack(sum);
    } else {
      float* to = partials<float>(params, params.peers.rank, home) + element + lane * 4;
      *reinterpret_cast<float4*>(to) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      to += slice.width / 2;
      *reinterpret_cast<float4*>(to) = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
  }

  __device__ __forceinline__ void load_partial(int owner, const Slice& slice, Columns& sum) const {
    const int64_t element = int64_t{slice.token} * params.hidden + slice.column;
    if (params.partials_bf16) {
      const uint16_t* from =
          partials<uint16_t>(params, owner, params.peers.rank) + element + lane * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
      add(sum, __ldcg(reinterpret_cast<const uint4*>(from)), 1.0f);
    } else {
      const float* from = partials<float>(params, owner, params.peers.rank) + element + lane * 4;
      const float4 low = __ldcg(reinterpret_cast<const float4*>(from));
      const float4 high = __ldcg(reinterpret_cast<const float4*>(from + slice.width / 2));
      sum[0] = low.x, sum[1] = low.y, sum[2] = low.z, sum[3] = low.w;
      sum[4] = high.x, sum[5] = high.y, sum[6] = high.z, sum[7] = high.w;
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
        const Slice slice = slice_at(first + i, slices);
        if (slice.token != known) routes = routes_of(home, slice.token);
        known = slice.token;
        if (routes.here == 0) continue;
        Columns sum;
        add_up(routes, slice, sum);
        if (slice.inside) store_partial(home, slice, sum);
        stored |= 1u << i;
      }
      __syncwarp();
      if (stored >> lane & 1u) ptx::st_release_sys(flags + first + lane, params.step);
    }
  }

  // This warp's part of round `round` of the peers' items, in rank order.
  __device__ __forceinline__ void return_partials(int slices, int round, int rounds) const {
    if (waiter.gave_up() || params.stall == kStallPartials) return;
    const Sources& sources = shared_state().sources;
    for (int home = 0; home < params.peers.num_ranks; ++home) {
      if (home == params.peers.rank) continue;
      const Run run = run_of(sources.num_tokens[home] * slices, round, rounds);
      return_run(home, run.begin, run.end, slices);
    }
  }

  // --- this rank's tokens

  // This rank's own partial is rounded as if it had crossed.
  __device__ __forceinline__ void own_partial(const TokenRoutes& routes, const Slice& slice,
                                              Columns& sum) const {
    add_up(routes, slice, sum);
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

  __device__ __forceinline__ void combine(const TokenRoutes& routes, const Slice& slice,
                                          int item) const {
    Columns total = {};
    for (uint32_t left = routes.owners; left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      Columns sum = {};
      if (owner == params.peers.rank) {
        own_partial(routes, slice, sum);
      } else {
        wait_for_partial(owner, slice.token, item);
        if (slice.inside) load_partial(owner, slice, sum);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) total[i] += sum[i];
    }
    if (slice.inside) store(total, int64_t{slice.token} * params.hidden + slice.lane_column);
  }

  __device__ __forceinline__ void store(const Columns& sum, int64_t element) const {
    if (params.output_f32) {
      float4* to = reinterpret_cast<float4*>(static_cast<float*>(params.output) + element);
      to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.output) + element) = pack(sum);
    }
  }

  __device__ __forceinline__ void combine_own(int slices, int round, int rounds) const {
    const Run run = run_of(params.num_tokens * slices, round, rounds);
    int known = -1;
    TokenRoutes routes;
    for (int item = run.begin; item < run.end && !waiter.gave_up(); ++item) {
      const Slice slice = slice_at(item, slices);
      if (slice.token != known) routes = routes_of(params.peers.rank, slice.token);
      known = slice.token;
      combine(routes, slice, item);
    }
  }

  // --- who does what

  struct Run {
    int begin;
    int end;
  };
  // This warp's run of the items (token, slice) of round `round`, in token order over the grid.
  __device__ __forceinline__ Run run_of(int items, int round, int rounds) const {
    const int round_items = (items + rounds - 1) / rounds;
    const int first = round * round_items;
    const int last = min(first + round_items, items);
    const int warps = gridDim.x * kExpertWarps;
    const int length = (round_items + warps - 1) / warps;
    const int begin = first + (warp * gridDim.x + blockIdx.x) * length;
    return {begin, min(begin + length, last)};
  }

  // Several ranks go in rounds, the same tokens first everywhere: while partial rows are under way
  // those of the round before are added up.
  __device__ __forceinline__ int num_rounds(int slices) const {
    if (params.peers.num_ranks == 1) return 1;
    int tokens = 0;
    for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
      tokens = max(tokens, shared_state().sources.num_tokens[rank]);
    }
    const int items = static_cast<int>(gridDim.x) * kExpertWarps * kFlagsAtOnce;
    return max(1, tokens * slices / items);
  }

  __device__ __forceinline__ void run() const {
    const int slices = layout::NumPartialSlices(params.hidden);
    wait_for_outputs();
    if (warp == 0 && lane == 0) mark(params, kMarkOutputs);
    const int rounds = num_rounds(slices);
    for (int round = 0; round < rounds; ++round) {
      if (params.peers.num_ranks > 1) return_partials(slices, round, rounds);
      combine_own(slices, round, rounds);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
