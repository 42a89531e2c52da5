#pragma once

#include "kernels/cuda/moe_layer/combine_warp.cuh"
#include "kernels/cuda/moe_layer/role_combine_few.cuh"
#include "kernels/cuda/moe_layer/role_return.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// The end of a step, by the warps that multiplied, after the tile list. First the tokens of peers
// that have not been returned: what this rank's experts add to them, one partial row a token, is
// stored to the rank that owns the token. Then this rank's own tokens: the ranks' partial rows,
// this one's included, are added in rank order. A partial is the sum of a rank's routes in their
// order in f32. The split over warps does not change what is added to what, so the bits are fixed.
// Here: one rank, and the tokens of ranks that have many (is_long), whose partial rows are flagged;
// role_combine_few.cuh: those of ranks that have few.
namespace expertd::cuda::moe_layer {

struct CombineRole : CombineWarp {
  static constexpr int kRowsAtOnce = 8;
  static constexpr int kRoundItems = 4 * kExpertWarps;  // (token, slice) of a CTA and a peer
  using Columns = PartialRow::Columns;
  using Slice = PartialRow::Slice;
  using TokenRoutes = PartialRow::TokenRoutes;

  using CombineWarp::CombineWarp;

  // The CTA's items of a rank's tokens in a round.
  __device__ __forceinline__ Run run_of(int num_tokens, int slices, int round) const {
    const Block tokens = tokens_of(num_tokens);
    const int count = tokens.count * slices;
    const int begin = min(round * kRoundItems, count);
    return {tokens.first * slices + begin, tokens.first * slices + min(begin + kRoundItems, count)};
  }

  // --- tokens of peers

  // Whether the announcing warp has returned a token; `base`: index of the peer's first token.
  __device__ __forceinline__ bool was_returned(int base, int home, int token, bool early) const {
    const int num_tokens = shared_state().sources.num_tokens[home];
    if (!early) return false;
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
      const Slice slice = row.slice_at(item, slices);
      if (slice.token != known) {
        known = slice.token;
        skip = was_returned(base, home, known, early);
        if (!skip) routes = row.routes_of(home, known);
      }
      if (skip || routes.here == 0) continue;
      Columns sum = {};
      row.add_up<kRowsAtOnce>(routes, slice, sum);
      row.store_partial(home, slice, sum);
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
        run = run_of(num_tokens, slices, round);
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
        Columns sum = {};
        row.add_up<kRowsAtOnce>(routes, slice, sum);
        add_own(sum, total);
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
      const Slice slice = row.slice_at(item, slices);
      if (slice.token != known) routes = row.routes_of(0, slice.token);
      known = slice.token;
      Columns sum = {};
      row.add_up<kRowsAtOnce>(routes, slice, sum);
      if (slice.inside) store(sum, slice.element + lane * 8);
    }
  }

  __device__ __forceinline__ void combine_own(const Run& run, int slices) const {
    const Run mine = warp_run(run);
    int known = -1;
    TokenRoutes routes;
    for (int item = mine.begin; item < mine.end && !waiter.gave_up(); ++item) {
      const Slice slice = row.slice_at(item, slices);
      if (slice.token != known) routes = row.routes_of(params.peers.rank, slice.token);
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
#pragma unroll 1
    for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
      most = max(most, tokens_of(shared_state().sources.num_tokens[rank]).count * slices);
    }
    const int rounds = (most + kRoundItems - 1) / kRoundItems;
#pragma unroll 1
    for (int round = 0; round <= rounds; ++round) {
      if (round < rounds) return_partials(slices, round, early);
      if (round > 0) {
        combine_own(run_of(params.num_tokens, slices, round - 1), slices);
      }
    }
  }
};

// Not inlined: what they keep would cost the multiplying loop registers, and one rank does not run
// the code of several, nor a short step that of long ones.
static __device__ __noinline__ void combine_many(const MoeLayerParams& params, int warp, int lane) {
  const CombineRole role(params, params, warp, lane);
  role.wait_for_outputs();
  role.combine_in_rounds();
}
static __device__ __noinline__ void combine_few(const MoeLayerParams& params,
                                                bool outputs_are_there, int warp, int lane) {
  const MoeLayerParams near = params;
  CombineFewRole(params, near, warp, lane).run(outputs_are_there);
}
static __device__ __noinline__ void combine_ranks(const MoeLayerParams& params, int warp,
                                                  int lane) {
  const bool many = any_is_long(params);
  if (many) combine_many(params, warp, lane);
  combine_few(params, many, warp, lane);
}
static __device__ __noinline__ void combine_outputs(const MoeLayerParams& params, int warp,
                                                    int lane) {
  if (params.peers.num_ranks > 1) return combine_ranks(params, warp, lane);
  const CombineRole role(params, params, warp, lane);
  role.wait_for_outputs();
  role.combine_alone(layout::NumPartialSlices(params.hidden));
}

}  // namespace expertd::cuda::moe_layer
