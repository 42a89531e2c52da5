#pragma once

#include "kernels/cuda/moe_layer/combine_warp.cuh"
#include "kernels/cuda/moe_layer/role_return.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// The end of a step for the ranks that have many tokens in it (is_long): in rounds, partial rows of
// the peers' tokens that have not been returned go out and are flagged by the announcing warp, then
// this rank's own tokens are added up.
namespace expertd::cuda::moe_layer {

struct CombineManyRole : CombineWarp {
  static constexpr int kRowsAtOnce = 8;
  static constexpr int kRowsInFlight = 8;
  static constexpr int kRanksAtOnce = 2;
  static constexpr int kRoundItems = 4 * kExpertWarps;  // (token, slice) of a CTA and a peer
  static constexpr int kRoundLag = 2;                   // rounds between returning and adding up
  static_assert(kRoundLag <= kRoundSlots);
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

  // --- tokens of peers

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

  // --- this rank's tokens

  // A lane's columns of a slice as they came.
  struct Sent {
    uint4 low;
    uint4 high;  // not in BF16
  };
  __device__ __forceinline__ void load(int owner, const Slice& slice, Sent& sent) const {
    if (!slice.inside) return;
    if (row.as_bf16) {
      const uint16_t* from = partials<uint16_t>(params, owner, params.peers.rank);
      sent.low = __ldcg(reinterpret_cast<const uint4*>(from + slice.element + lane * 8));
      return;
    }
    const float* from =
        partials<float>(params, owner, params.peers.rank) + slice.element + lane * 4;
    sent.low = __ldcg(reinterpret_cast<const uint4*>(from));
    sent.high = __ldcg(reinterpret_cast<const uint4*>(from + slice.width / 2));
  }
  __device__ __forceinline__ void add(const Slice& slice, const Sent& sent, Columns& total) const {
    if (!slice.inside) return;
    if (row.as_bf16) return PartialRow::add(total, sent.low, 1.0f);
    const uint32_t words[8] = {sent.low.x,  sent.low.y,  sent.low.z,  sent.low.w,
                               sent.high.x, sent.high.y, sent.high.z, sent.high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] += __uint_as_float(words[i]);
  }

  // Slices begin .. end - 1 of a token, of all of `owners` at once: a lane each.
  __device__ __forceinline__ void wait_for_partials(uint32_t owners, int token, int begin, int end,
                                                    int slices) const {
    const int num_ranks = params.peers.num_ranks;
    const int at_once = 32 / num_ranks;
    const int owner = lane % num_ranks;
    const bool waits = (owners >> owner & 1u) != 0 && lane / num_ranks < at_once;
    const uint32_t* flags =
        partial_flags(params, waits ? owner : 0, params.peers.rank) + token * slices;
#pragma unroll 1
    for (; begin < end; begin += at_once) {
      const int slice = begin + lane / num_ranks;
      (void)waiter.wait_for_peer({kWaitPartials, static_cast<uint32_t>(token), owner}, [&] {
        return waits && slice < end ? ptx::ld_acquire_sys(flags + slice) : params.step;
      });
    }
  }

  // All loads of a slice are on their way before the first is used.
  __device__ __forceinline__ void combine(const TokenRoutes& routes, const Slice& slice) const {
    const int rank = params.peers.rank;
    Columns own = {};
    Columns total = {};
#pragma unroll 1
    for (uint32_t left = routes.owners; left != 0;) {
      Sent sent[kRanksAtOnce];
      uint32_t to_load = left;
#pragma unroll
      for (int i = 0; i < kRanksAtOnce; ++i) {
        const int owner = __ffs(to_load) - 1;
        to_load &= to_load - 1;
        if (owner >= 0 && owner != rank) load(owner, slice, sent[i]);
      }
      if (left == routes.owners) row.add_up<kRowsAtOnce>(routes, slice, own);
#pragma unroll
      for (int i = 0; i < kRanksAtOnce; ++i) {
        if (left == 0) continue;
        const int owner = __ffs(left) - 1;
        left &= left - 1;
        if (owner == rank) {
          add_own(own, total);
        } else {
          add(slice, sent[i], total);
        }
      }
    }
    if (slice.inside) store(total, slice.element + lane * 8);
  }

  __device__ __forceinline__ void combine_own(const Run& run, int slices) const {
    for_each_token(run, slices, [&](int token, int begin, int end) {
      if (waiter.gave_up()) return;
      const TokenRoutes routes = row.routes_of(params.peers.rank, token);
      wait_for_partials(routes.owners & ~(1u << params.peers.rank), token, begin, end, slices);
      for (int at = begin; at < end; ++at) combine(routes, row.slice_of(token, at));
    });
  }

  __device__ __forceinline__ int num_rounds(int slices) const {
    int most = 0;
#pragma unroll 1
    for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
      most = max(most, tokens_of(shared_state().sources.num_tokens[rank]).count * slices);
    }
    return (most + kRoundItems - 1) / kRoundItems;
  }

  // Several ranks go in rounds, the same tokens of a rank at the same time everywhere, so that a
  // round waits for partial rows of that round only. They are added up when those of the rounds
  // behind it have been stored: by then they have had the time to come. A fence at system scope
  // waits until the link has taken every store of the SM, so one warp that has nothing else to do
  // fences and flags, at most kRoundSlots rounds behind.
  __device__ __forceinline__ void combine_in_rounds() const {
    const int slices = layout::NumPartialSlices(params.hidden);
    const bool early = returns_early(params);
    const int rounds = num_rounds(slices);
    PipelineState slot;
#pragma unroll 1
    for (int round = 0; round < rounds + kRoundLag; ++round) {
      if (round < rounds) {
        waiter.wait(round_flagged_barrier(slot.index), slot.phase ^ 1u);
        return_round(slices, round, early);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(round_stored_barrier(slot.index));
        slot.advance(kRoundSlots);
      }
      if (round >= kRoundLag)
        combine_own(run_of(params.num_tokens, slices, round - kRoundLag), slices);
    }
  }

  // By the announcing warp meanwhile.
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
