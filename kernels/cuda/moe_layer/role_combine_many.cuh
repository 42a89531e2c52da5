#pragma once

#include "kernels/cuda/moe_layer/return_rounds.cuh"

// The end of a step for the ranks that have many tokens in it (has_many_tokens): in rounds, the
// partial rows of the peers' tokens are returned, then this rank's own tokens are added up.
namespace expertd::cuda::moe_layer {

struct CombineManyRole : ReturnRounds {
  static constexpr int kRowsAtOnce = 8;
  static constexpr int kRoundLag = 2;  // rounds between returning and adding up
  static_assert(kRoundLag <= kRoundSlots);
  using Slice = PartialRow::Slice;

  // Where the first peer's partial rows came to, and how far from it the next one's. Kept: to make
  // an address anew takes six parameters.
  const char* came;
  int64_t came_step;
  int rank;

  __device__ __forceinline__ CombineManyRole(const MoeLayerParams& params,
                                             const MoeLayerParams& near, int warp, int lane)
      : ReturnRounds(params, near, warp, lane),
        came(params.peers.at<char>(params.peers.rank, params.workspace.partials)),
        came_step(partial_elements(params) * sizeof(float)),
        rank(params.peers.rank) {}

  // A lane's columns of a slice as they came.
  struct Sent {
    uint4 low;
    uint4 high;  // not in BF16
  };
  // Of the lowest of `peers`.
  __device__ __forceinline__ void load(uint32_t peers, const Slice& slice, Sent& sent) const {
    if (peers == 0 || !slice.inside) return;
    const char* from = came + layout::PeerIndex(__ffs(peers) - 1, rank) * came_step + lane * 16;
    if (row.as_bf16) {
      sent.low = __ldcg(reinterpret_cast<const uint4*>(from + slice.element * 2));
      return;
    }
    from += slice.element * 4;
    sent.low = __ldcg(reinterpret_cast<const uint4*>(from));
    sent.high = __ldcg(reinterpret_cast<const uint4*>(from + slice.width * 2));
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

  // A slice's rows here, and what the first peer sent, are on their way together; the next peer's
  // while one's are added.
  __device__ __forceinline__ void combine(const TokenRoutes& routes, const Slice& slice) const {
    uint32_t peers = routes.owners & ~(1u << rank);
    Sent sent = {};
    load(peers, slice, sent);
    Columns own = {};
    row.add_up<kRowsAtOnce>(routes, slice, own);
    Columns total = {};
#pragma unroll 1
    for (uint32_t left = routes.owners; left != 0; left &= left - 1) {
      if (__ffs(left) - 1 == rank) {
        add_own(own, total);
        continue;
      }
      Sent next = {};
      peers &= peers - 1;
      load(peers, slice, next);
      add(slice, sent, total);
      sent = next;
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

  // A round waits for partial rows of that round only. They are added up when those of the rounds
  // behind it have been stored: by then they have had the time to come.
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
};

}  // namespace expertd::cuda::moe_layer
