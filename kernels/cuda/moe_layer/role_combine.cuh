#pragma once

#include "kernels/cuda/moe_layer/partial_row.cuh"
#include "kernels/cuda/moe_layer/role_return.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// The end of a step, by the warps that multiplied, after the tile list. First the tokens of peers
// that the announcing warp has not returned: what this rank's experts add to them, one partial row
// a token, is stored to the rank that owns the token and flagged there. Then this rank's own
// tokens: the ranks' partial rows, this one's included, are added in rank order. A partial is the
// sum of a rank's routes in their order in f32. The split over warps does not change what is added
// to what, so the bits are fixed.
namespace expertd::cuda::moe_layer {

static __device__ __noinline__ void combine_ranks(const MoeLayerParams& params, int warp, int lane);

struct CombineRole {
  static constexpr int kRowsAtOnce = 8;
  static constexpr int kRoundItems = 4 * kExpertWarps;  // (token, slice) of a CTA and a peer
  using Columns = PartialRow::Columns;
  using Slice = PartialRow::Slice;
  using TokenRoutes = PartialRow::TokenRoutes;

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;
  int lane;

  __device__ __forceinline__ PartialRow row() const { return {params, lane}; }

  // Each warp looks at its share of the flags; a barrier joins them and the announcing warp.
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
    ptx::barrier_sync<kCombineBarrier>(kCombiningThreads);
  }

  // Items (token, slice) in token order.
  struct Run {
    int begin;
    int end;
  };
  // The CTA's items of a rank's tokens in a round.
  __device__ __forceinline__ Run run_of(int num_tokens, int slices, int round,
                                        int round_items) const {
    const Block items = items_of(num_tokens, slices);
    const int begin = min(round * round_items, items.count);
    return {items.first + begin, items.first + min(begin + round_items, items.count)};
  }
  // This warp's part of that.
  __device__ __forceinline__ Run warp_run(const Run& run) const {
    const int length = (run.end - run.begin + kExpertWarps - 1) / kExpertWarps;
    const int begin = run.begin + warp * length;
    return {begin, min(begin + length, run.end)};
  }

  // --- tokens of peers

  // Whether the announcing warp has returned a token; `base`: index of the peer's first token.
  __device__ __forceinline__ bool was_returned(int base, int home, int token, bool early) const {
    const int num_tokens = shared_state().sources.num_tokens[home];
    if (!early || !is_long(num_tokens)) return false;
    const int index = base + token - tokens_of(num_tokens).first;
    return index < kMaxReturnKeys && shared_state().return_keys[index] == kNothingToReturn;
  }

  __device__ __forceinline__ void return_items(int home, const Run& run, int slices, int base,
                                               bool early) const {
    const Run mine = warp_run(run);
    int known = -1;
    bool skip = false;
    TokenRoutes routes;
    for (int item = mine.begin; item < mine.end; ++item) {
      const Slice slice = row().slice_at(item, slices);
      if (slice.token != known) {
        known = slice.token;
        skip = was_returned(base, home, known, early);
        if (!skip) routes = row().routes_of(home, known);
      }
      if (skip || routes.here == 0) continue;
      Columns sum = {};
      row().add_up<kRowsAtOnce>(routes, slice, sum);
      row().store_partial(home, slice, sum);
    }
  }

  // One warp, when all have stored: a fence at system scope waits for every store of the SM on its
  // way, so there are few of them. Items without a partial row are flagged too; nobody looks. Those
  // that the announcing warp returns are flagged by it alone, when they have arrived.
  __device__ __forceinline__ void flag_items(int home, const Run& run, int slices, int base,
                                             bool early) const {
    uint32_t* flags = partial_flags(params, params.peers.rank, home);
    ptx::fence_acq_rel_sys();
    for (int item = run.begin + lane; item < run.end; item += 32) {
      if (!was_returned(base, home, item / slices, early)) {
        ptx::st_relaxed_sys(flags + item, params.step);
      }
    }
  }

  // The CTA's part of a round of every peer's items.
  __device__ __forceinline__ void return_partials(int slices, int round, bool early) const {
    const bool returns = !waiter.gave_up() && params.stall != kStallPartials;
    int base = 0;
    for (int home = 0; home < params.peers.num_ranks; ++home) {
      if (home == params.peers.rank) continue;
      const int num_tokens = shared_state().sources.num_tokens[home];
      Run run = {0, 0};
      if (returns) {
        run = run_of(num_tokens, slices, round, kRoundItems);
        return_items(home, run, slices, base, early);
      }
      ptx::barrier_sync<kReturnBarrier>(kExpertWarps * 32);
      if (warp == (round + home) % kExpertWarps && run.begin < run.end && !waiter.gave_up()) {
        flag_items(home, run, slices, base, early);
      }
      base += tokens_of(num_tokens).count;
    }
  }

  // --- this rank's tokens

  // total += what `owner` sent.
  __device__ __forceinline__ void add_partial(int owner, const Slice& slice, Columns& total) const {
    if (!slice.inside) return;
    if (params.partials_bf16) {
      const uint16_t* from = partials<uint16_t>(params, owner, params.peers.rank);
      PartialRow::add(
          total, __ldcg(reinterpret_cast<const uint4*>(from + slice.element + lane * 8)), 1.0f);
      return;
    }
    const float* from =
        partials<float>(params, owner, params.peers.rank) + slice.element + lane * 4;
    const float4 low = __ldcg(reinterpret_cast<const float4*>(from));
    const float4 high = __ldcg(reinterpret_cast<const float4*>(from + slice.width / 2));
    total[0] += low.x, total[1] += low.y, total[2] += low.z, total[3] += low.w;
    total[4] += high.x, total[5] += high.y, total[6] += high.z, total[7] += high.w;
  }

  // Rounded as if it had crossed.
  __device__ __forceinline__ void add_own_partial(const TokenRoutes& routes, const Slice& slice,
                                                  Columns& total) const {
    Columns sum = {};
    row().add_up<kRowsAtOnce>(routes, slice, sum);
    if (params.partials_bf16) {
      PartialRow::add(total, PartialRow::pack(sum), 1.0f);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) total[i] += sum[i];
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
    if (slice.inside) store(total, slice.element + lane * 8);
  }

  // One rank: there is one partial, and it does not cross.
  __device__ __forceinline__ void combine_alone(int slices) const {
    const Block items = items_of(params.num_tokens, slices);
    const Run mine = warp_run({items.first, items.first + items.count});
    int known = -1;
    TokenRoutes routes;
    for (int item = mine.begin; item < mine.end && !waiter.gave_up(); ++item) {
      const Slice slice = row().slice_at(item, slices);
      if (slice.token != known) routes = row().routes_of(0, slice.token);
      known = slice.token;
      Columns sum = {};
      row().add_up<kRowsAtOnce>(routes, slice, sum);
      if (slice.inside) store(sum, slice.element + lane * 8);
    }
  }

  __device__ __forceinline__ void store(const float (&values)[8], int64_t element) const {
    if (params.output_f32) {
      float4* to = reinterpret_cast<float4*>(static_cast<float*>(params.output) + element);
      to[0] = make_float4(values[0], values[1], values[2], values[3]);
      to[1] = make_float4(values[4], values[5], values[6], values[7]);
    } else {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.output) + element) =
          PartialRow::pack(values);
    }
  }

  __device__ __forceinline__ void combine_own(const Run& run, int slices) const {
    const Run mine = warp_run(run);
    int known = -1;
    TokenRoutes routes;
    for (int item = mine.begin; item < mine.end && !waiter.gave_up(); ++item) {
      const Slice slice = row().slice_at(item, slices);
      if (slice.token != known) routes = row().routes_of(params.peers.rank, slice.token);
      known = slice.token;
      combine(routes, slice, item);
    }
  }

  // Several ranks go in rounds, the same tokens of a rank at the same time everywhere, so that a
  // round waits for partial rows of that round only. They are added up when those of the next round
  // have been sent: by then they have had the time to come.
  __device__ __forceinline__ void combine_in_rounds() const {
    const int slices = layout::NumPartialSlices(params.hidden);
    const bool early = returns_early(params);
    int most = 0;
    for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
      most = max(most, items_of(shared_state().sources.num_tokens[rank], slices).count);
    }
    const int rounds = (most + kRoundItems - 1) / kRoundItems;
#pragma unroll 1
    for (int round = 0; round <= rounds; ++round) {
      if (round < rounds) return_partials(slices, round, early);
      if (round > 0) {
        combine_own(run_of(params.num_tokens, slices, round - 1, kRoundItems), slices);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int slices = layout::NumPartialSlices(params.hidden);
    wait_for_outputs();
    if (warp == 0 && lane == 0) mark(params, kMarkOutputs);
    if (params.peers.num_ranks > 1) {
      combine_ranks(params, warp, lane);
    } else {
      combine_alone(slices);
    }
  }
};

// Not inlined: what they keep would cost the multiplying loop registers, and one rank does not run
// the code of several.
static __device__ __noinline__ void combine_ranks(const MoeLayerParams& params, int warp,
                                                  int lane) {
  CombineRole{params, Waiter{params}, warp, lane}.combine_in_rounds();
}
static __device__ __noinline__ void combine_outputs(const MoeLayerParams& params, int warp,
                                                    int lane) {
  CombineRole{params, Waiter{params}, warp, lane}.run();
}

}  // namespace expertd::cuda::moe_layer
