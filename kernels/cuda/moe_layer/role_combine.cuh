#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// The weighted sum of each token's expert outputs, by the warps that multiplied, after the tile
// list. A warp takes 512 columns of a token at a time. First the tokens of peers: what this rank's
// experts add to them, one partial row a token, is stored to the rank that owns the token and
// flagged there. Then this rank's own tokens: the ranks' partial rows, this one's included, are
// added in rank order. A partial is the sum of a rank's routes in their order in f32. The split
// over warps does not change what is added to what, so the bits are fixed.
namespace expertd::cuda::moe_layer {

struct CombineRole {
  static constexpr int kParts = 2;  // of a slice; a lane has 8 neighbouring columns of each
  static constexpr int kPartColumns = 256;
  static_assert(kParts * kPartColumns == layout::kPartialColumns);
  static constexpr int kRowsAtOnce = 3;
  static constexpr int kItemsAtOnce = 2;  // of a warp in a round
  using Columns = float[kParts][8];

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;
  int lane;

  // 512 columns of a token, fewer at the row's end.
  struct Slice {
    int token;
    int64_t element;    // of [T][H], where the slice begins
    int width[kParts];  // columns of the parts

    __device__ __forceinline__ bool inside(int part, int lane) const {
      return lane * 8 < width[part];
    }
  };
  __device__ __forceinline__ Slice slice_at(int item, int slices) const {
    Slice slice;
    slice.token = item / slices;
    const int column = (item - slice.token * slices) * layout::kPartialColumns;
    slice.element = int64_t{slice.token} * params.hidden + column;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      slice.width[part] = min(kPartColumns, params.hidden - column - part * kPartColumns);
    }
    return slice;
  }

  // A token's routes: lane k holds route k's weight.
  struct TokenRoutes {
    uint32_t here = 0;    // routes that this rank computes
    uint32_t owners = 0;  // ranks that compute a route
    float weight = 0;
    int64_t first_route = 0;
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
    const int top_k = sources.top_k[source];
    const int in_source = token * top_k + lane;
    TokenRoutes routes;
    routes.first_route = int64_t{sources.first_route[source]} + token * top_k;
    uint32_t owner = 0;  // 1 + rank
    if (lane < top_k) {
      owner = route_owners(params)[routes.first_route + lane];
      const float* weights = source == params.peers.rank
                                 ? params.weights
                                 : route_weights(params, source, params.peers.rank);
      routes.weight = __ldcg(weights + in_source);
    }
    const bool here = owner == static_cast<uint32_t>(params.peers.rank) + 1;
    routes.here = __ballot_sync(0xffffffffu, here);
    routes.owners = __reduce_or_sync(0xffffffffu, owner == 0 ? 0 : 1u << (owner - 1));
    return routes;
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

  // What this rank's routes add to a slice, route after route; several are loaded at once.
  __device__ __forceinline__ void add_up(const TokenRoutes& routes, const Slice& slice,
                                         Columns& sum) const {
    const int64_t in_row = slice.element - int64_t{slice.token} * params.hidden;
    const uint16_t* y = params.local.y + routes.first_route * params.hidden + in_row + lane * 8;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[part][i] = 0.0f;
    }
#pragma unroll 1
    for (uint32_t left = routes.here; left != 0;) {
      uint4 rows[kRowsAtOnce][kParts];
      float weights[kRowsAtOnce];
      int count = 0;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (left == 0) continue;
        const int k = __ffs(left) - 1;
        left &= left - 1;
        ++count;
        weights[i] = __shfl_sync(0xffffffffu, routes.weight, k);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (!slice.inside(part, lane)) continue;
          rows[i][part] = __ldcg(
              reinterpret_cast<const uint4*>(y + int64_t{k} * params.hidden + part * kPartColumns));
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (i >= count) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (slice.inside(part, lane)) add(sum[part], rows[i][part], weights[i]);
        }
      }
    }
  }

  // Items (token, slice) in token order.
  struct Run {
    int begin;
    int end;
  };
  // This CTA's part of round `round`.
  __device__ __forceinline__ Run run_of(int items, int round, int rounds) const {
    const int round_items = (items + rounds - 1) / rounds;
    const int first = round * round_items;
    const int last = min(first + round_items, items);
    const int ctas = static_cast<int>(gridDim.x);
    const int length = (round_items + ctas - 1) / ctas;
    const int begin = first + static_cast<int>(blockIdx.x) * length;
    return {begin, min(begin + length, last)};
  }
  // This warp's part of that.
  __device__ __forceinline__ Run warp_run(const Run& run) const {
    const int length = (max(run.end - run.begin, 0) + kExpertWarps - 1) / kExpertWarps;
    const int begin = run.begin + warp * length;
    return {begin, min(begin + length, run.end)};
  }

  // --- tokens of peers

  // A part crosses as BF16 in the order of its columns, or as F32 in two halves: the first four
  // columns of every lane, then the others. Each store of a warp is one piece that way.
  __device__ __forceinline__ void store_partial(int home, const Slice& slice,
                                                const Columns& sum) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!slice.inside(part, lane)) continue;
      const int64_t element = slice.element + part * kPartColumns;
      const float(&values)[8] = sum[part];
      if (params.partials_bf16) {
        uint16_t* to = partials<uint16_t>(params, params.peers.rank, home) + element + lane * 8;
        *reinterpret_cast<uint4*>(to) = pack(values);
      } else {
        float* to = partials<float>(params, params.peers.rank, home) + element + lane * 4;
        *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
        to += slice.width[part] / 2;
        *reinterpret_cast<float4*>(to) = make_float4(values[4], values[5], values[6], values[7]);
      }
    }
  }

  // total += what `owner` sent.
  __device__ __forceinline__ void add_partial(int owner, const Slice& slice, Columns& total) const {
    uint4 words[kParts][2];
    const bool bf16 = params.partials_bf16 != 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!slice.inside(part, lane)) continue;
      const int64_t element = slice.element + part * kPartColumns;
      if (bf16) {
        words[part][0] = __ldcg(reinterpret_cast<const uint4*>(
            partials<uint16_t>(params, owner, params.peers.rank) + element + lane * 8));
      } else {
        const float* from = partials<float>(params, owner, params.peers.rank) + element + lane * 4;
        words[part][0] = __ldcg(reinterpret_cast<const uint4*>(from));
        words[part][1] = __ldcg(reinterpret_cast<const uint4*>(from + slice.width[part] / 2));
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!slice.inside(part, lane)) continue;
      if (bf16) {
        add(total[part], words[part][0], 1.0f);
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& word = words[part][half];
        total[part][4 * half] += __uint_as_float(word.x);
        total[part][4 * half + 1] += __uint_as_float(word.y);
        total[part][4 * half + 2] += __uint_as_float(word.z);
        total[part][4 * half + 3] += __uint_as_float(word.w);
      }
    }
  }

  // The CTA's items of a round for one rank, warp by warp. Returns them.
  __device__ __forceinline__ Run return_items(int home, int slices, int round, int rounds) const {
    const Run run = run_of(shared_state().sources.num_tokens[home] * slices, round, rounds);
    const Run mine = warp_run(run);
    int known = -1;
    TokenRoutes routes;
    for (int item = mine.begin; item < mine.end; ++item) {
      const Slice slice = slice_at(item, slices);
      if (slice.token != known) routes = routes_of(home, slice.token);
      known = slice.token;
      if (routes.here == 0) continue;
      Columns sum;
      add_up(routes, slice, sum);
      store_partial(home, slice, sum);
    }
    return run;
  }

  // This CTA's part of a round of the peers' items. One warp tells the peers when all have stored:
  // a fence at system scope waits for every store of the SM on its way, so there are few of them.
  // Items without a partial row are flagged too; nobody looks.
  __device__ __forceinline__ void return_partials(int slices, int round, int rounds) const {
    const bool returns = !waiter.gave_up() && params.stall != kStallPartials;
    for (int i = 1; i < params.peers.num_ranks; ++i) {
      const int home = (params.peers.rank + i) % params.peers.num_ranks;
      Run run = {0, 0};
      if (returns) run = return_items(home, slices, round, rounds);
      ptx::barrier_sync<kReturnBarrier>(kExpertWarps * 32);
      if (warp != (round + i) % kExpertWarps || waiter.gave_up()) continue;
      uint32_t* flags = partial_flags(params, params.peers.rank, home);
      ptx::fence_acq_rel_sys();
      for (int item = run.begin + lane; item < run.end; item += 32) {
        ptx::st_relaxed_sys(flags + item, params.step);
      }
    }
  }

  // --- this rank's tokens

  // Rounded as if it had crossed.
  __device__ __forceinline__ void add_own_partial(const TokenRoutes& routes, const Slice& slice,
                                                  Columns& total) const {
    const bool rounds = params.partials_bf16 != 0 && params.peers.num_ranks > 1;
    Columns sum;
    add_up(routes, slice, sum);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (rounds) {
        add(total[part], pack(sum[part]), 1.0f);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) total[part][i] += sum[part][i];
      }
    }
  }

  __device__ __forceinline__ void wait_for_partial(int owner, int token, int item) const {
    const uint32_t* flag = partial_flags(params, owner, params.peers.rank) + item;
    (void)waiter.wait_for_peer({kWaitPartials, static_cast<uint32_t>(token), owner},
                               [&] { return ptx::ld_acquire_sys(flag); });
  }

  __device__ __forceinline__ void combine(const TokenRoutes& routes, const Slice& slice,
                                          int item) const {
    Columns total = {};
#pragma unroll 1
    for (uint32_t left = routes.owners; left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      if (owner == params.peers.rank) {
        add_own_partial(routes, slice, total);
      } else {
        wait_for_partial(owner, slice.token, item);
        add_partial(owner, slice, total);
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (slice.inside(part, lane)) {
        store(total[part], slice.element + part * kPartColumns + lane * 8);
      }
    }
  }

  __device__ __forceinline__ void store(const float (&values)[8], int64_t element) const {
    if (params.output_f32) {
      float4* to = reinterpret_cast<float4*>(static_cast<float*>(params.output) + element);
      to[0] = make_float4(values[0], values[1], values[2], values[3]);
      to[1] = make_float4(values[4], values[5], values[6], values[7]);
    } else {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.output) + element) = pack(values);
    }
  }

  __device__ __forceinline__ void combine_own(int slices, int round, int rounds) const {
    const Run mine = warp_run(run_of(params.num_tokens * slices, round, rounds));
    int known = -1;
    TokenRoutes routes;
    for (int item = mine.begin; item < mine.end && !waiter.gave_up(); ++item) {
      const Slice slice = slice_at(item, slices);
      if (slice.token != known) routes = routes_of(params.peers.rank, slice.token);
      known = slice.token;
      combine(routes, slice, item);
    }
  }

  // Several ranks go in rounds, the same tokens first everywhere.
  __device__ __forceinline__ int num_rounds(int slices) const {
    if (params.peers.num_ranks == 1) return 1;
    int tokens = 0;
    for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
      tokens = max(tokens, shared_state().sources.num_tokens[rank]);
    }
    const int items = static_cast<int>(gridDim.x) * kExpertWarps * kItemsAtOnce;
    return max(1, tokens * slices / items);
  }

  // A round's tokens are added up when the partial rows of the next have been sent: those of the
  // peers have had the time to come.
  __device__ __forceinline__ void run() const {
    const int slices = layout::NumPartialSlices(params.hidden);
    wait_for_outputs();
    if (warp == 0 && lane == 0) mark(params, kMarkOutputs);
    if (params.peers.num_ranks == 1) return combine_own(slices, 0, 1);
    const int rounds = num_rounds(slices);
#pragma unroll 1
    for (int round = 0; round <= rounds; ++round) {
      if (round < rounds) return_partials(slices, round, rounds);
      if (round > 0) combine_own(slices, round - 1, rounds);
    }
  }
};

// Not inlined: what it keeps would cost the multiplying loop registers.
static __device__ __noinline__ void combine_outputs(const MoeLayerParams& params, int warp,
                                                    int lane) {
  CombineRole{params, Waiter{params}, warp, lane}.run();
}

}  // namespace expertd::cuda::moe_layer
