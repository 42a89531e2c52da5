#pragma once

#include "kernels/cuda/moe_layer/combine_warp.cuh"
#include "kernels/cuda/moe_layer/role_return.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

namespace expertd::cuda::moe_layer {

// The end of a step, of ranks that have many tokens in it (has_many_tokens): the partial rows of
// the peers' tokens that have not been returned go out in rounds, the same tokens of a rank at the
// same time everywhere. The combining warps store a round, the announcing warp fences and flags it:
// a fence at system scope waits until the link has taken every store of the SM, and that warp has
// nothing else to do. It is at most kRoundSlots rounds behind.
struct ReturnRounds : CombineWarp {
  static constexpr int kRowsInFlight = 8;
  static constexpr int kRoundItems = 4 * kExpertWarps;  // (token, slice) of a CTA and a peer
  using Columns = PartialRow::Columns;
  using TokenRoutes = PartialRow::TokenRoutes;

  using CombineWarp::CombineWarp;

  // The CTA's items of a rank's tokens in a round.
  __device__ __forceinline__ Run run_of(int num_tokens, int slices, int round) const {
    const Block tokens = tokens_of(num_tokens);
    const int count = tokens.count * slices;
    const int begin = min(round * kRoundItems, count);
    return {tokens.first * slices + begin, tokens.first * slices + min(begin + kRoundItems, count)};
  }
  // visit(token, first slice, slice behind the last) for each token that this warp has a part of.
  template <typename Visit>
  __device__ __forceinline__ void for_each_token(const Run& run, int slices, Visit visit) const {
    const Run mine = warp_run(run);
    if (mine.begin >= mine.end) return;
    int token = mine.begin / slices;
    int begin = mine.begin - token * slices;
#pragma unroll 1
    for (int left = mine.end - mine.begin; left > 0; ++token) {
      const int end = min(begin + left, slices);
      visit(token, begin, end);
      left -= end - begin;
      begin = 0;
    }
  }

  __device__ __forceinline__ int num_rounds(int slices) const {
    int most = 0;
#pragma unroll 1
    for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
      most = max(most, tokens_of(shared_state().sources.num_tokens[rank]).count * slices);
    }
    return (most + kRoundItems - 1) / kRoundItems;
  }

  // What the announcing warp has done for a token: kNothingToReturn, kStored + slices, or nothing
  // (anything lower). `base`: index of the peer's first token.
  __device__ __forceinline__ int return_key(int base, int home, int token, bool early) const {
    if (!early) return 0;
    const int index = base + token - tokens_of(shared_state().sources.num_tokens[home]).first;
    return index < kMaxReturnKeys ? shared_state().return_keys[index] : 0;
  }

  __device__ __forceinline__ void return_items(int home, const Run& run, int slices, int base,
                                               bool early) const {
    for_each_token(run, slices, [&](int token, int begin, int end) {
      const int key = return_key(base, home, token, early);
      if (key >= kStored) begin = max(begin, key - kStored);
      if (begin >= end) return;
      const TokenRoutes routes = row.routes_of(home, token);
      if (routes.here == 0) return;
      char* to = row.destination(home, token);
      row.add_up_slices<kRowsInFlight>(
          routes, begin, end, [&](int at, const Columns& sum) { row.store_partial(to, at, sum); });
    });
  }

  __device__ __forceinline__ bool returns() const {
    return !waiter.gave_up() && params.stall != kStallPartials;
  }
  // What a CTA returns in a round: visit(peer, its items, index of its first token).
  template <typename Visit>
  __device__ __forceinline__ void for_each_peer(int slices, int round, Visit visit) const {
    int base = 0;
#pragma unroll 1
    for (int home = 0; home < params.peers.num_ranks; ++home) {
      if (home == params.peers.rank) continue;
      const int num_tokens = shared_state().sources.num_tokens[home];
      visit(home, run_of(num_tokens, slices, round), base);
      base += tokens_of(num_tokens).count;
    }
  }
  __device__ __forceinline__ void return_round(int slices, int round, bool early) const {
    if (!returns()) return;
    for_each_peer(slices, round, [&](int home, const Run& run, int base) {
      return_items(home, run, slices, base, early);
    });
  }

  // By the announcing warp. Its fence covers what it stored itself of tokens that it has not
  // flagged, too. Items without a partial row are flagged as well; nobody looks.
  __device__ __forceinline__ void flag_round(int slices, int round, bool early) const {
    if (!returns()) return;
    ptx::fence_acq_rel_sys();
    for_each_peer(slices, round, [&](int home, const Run& run, int base) {
      uint32_t* flags = partial_flags(params, params.peers.rank, home);
      for (int item = run.begin + lane; item < run.end; item += 32) {
        if (return_key(base, home, item / slices, early) != kNothingToReturn) {
          ptx::st_relaxed_sys(flags + item, params.step);
        }
      }
    });
  }

  // By the announcing warp, while the others store.
  __device__ __forceinline__ void flag_rounds() const {
    const int slices = layout::NumPartialSlices(params.hidden);
    const bool early = returns_early(params);
    PipelineState slot;
#pragma unroll 1
    for (int round = 0, rounds = num_rounds(slices); round < rounds; ++round) {
      waiter.wait(round_stored_barrier(slot.index), slot.phase);
      __syncwarp();
      flag_round(slices, round, early);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(round_flagged_barrier(slot.index));
      slot.advance(kRoundSlots);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
