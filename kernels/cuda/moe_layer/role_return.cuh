#pragma once

#include "kernels/cuda/moe_layer/partial_row.cuh"
#include "kernels/cuda/moe_layer/role_dispatch.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// Partial rows of the peers' tokens that can go back while FC2 still runs: FC2 goes slot after
// slot, and a token's partial row is due when the last slot that it needs here is complete. In long
// steps the announcing warp of each CTA returns those of the CTA's tokens (tokens_of) that are due
// early enough; combine returns the others.
namespace expertd::cuda::moe_layer {

__device__ __forceinline__ bool returns_early(const MoeLayerParams& params) {
  bool any = false;
  for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
    any |= rank != params.peers.rank && is_long(shared_state().sources.num_tokens[rank]);
  }
  return any && params.stall != kStallPartials;
}

// What is in SharedState::return_keys: the last slot that the CTA's token `index` needs here, or
// that there is nothing (more) to return. Index: tokens of all peers, in rank order; those beyond
// the table are combine's.
inline constexpr uint16_t kNothingToReturn = 0xffff;

struct PartialSender {
  static constexpr int kRowsAtOnce = 4;

  const MoeLayerParams& params;
  Waiter waiter;
  int lane;
  bool active;
  int complete = 0;  // slots whose outputs are all there
  // The token that is being returned, or -1.
  int home = -1;
  int token = 0;
  int slice = 0;  // the next one
  uint64_t settled_at_ns = 0;
  PartialRow::TokenRoutes routes;

  __device__ __forceinline__ PartialSender(const MoeLayerParams& p, int l)
      : params(p), waiter{p}, lane(l), active(returns_early(p)) {
    if (active) make_keys();
  }

  // (index, peer, token of it) of every token of the CTA that the table holds, a lane each.
  template <typename Visit>
  __device__ __forceinline__ void for_each_token(Visit visit) const {
    int base = 0;
    for (int peer = 0; peer < params.peers.num_ranks; ++peer) {
      if (peer == params.peers.rank) continue;
      const Block block = tokens_of(shared_state().sources.num_tokens[peer]);
      for (int i = lane; i < block.count && base + i < kMaxReturnKeys; i += 32) {
        visit(base + i, peer, block.first + i);
      }
      base += block.count;
    }
  }

  __device__ __forceinline__ uint16_t last_slot(int peer, int peer_token) const {
    const int rank = params.peers.rank;
    const int top_k = shared_state().sources.top_k[peer];
    int last = -1;
    for (int k = 0; k < top_k; ++k) {
      const layout::RouteRecord route = route_record(params, peer, peer_token * top_k + k);
      if (route.expert < 0) continue;
      const int local = placed_slot(params, route.expert, route.row) - rank * params.slots_per_rank;
      if (local >= 0 && local < params.num_slots) last = max(last, local);
    }
    return last < 0 ? kNothingToReturn : static_cast<uint16_t>(last);
  }

  __device__ __forceinline__ void make_keys() {
    for_each_token([&](int index, int peer, int peer_token) {
      shared_state().return_keys[index] = last_slot(peer, peer_token);
    });
    __syncwarp();
  }

  // The token that was due first; if none is yet, one look at the next slot.
  __device__ __forceinline__ void begin_token() {
    uint32_t best = 0xffffffffu;  // slot << 16 | index
    for_each_token([&](int index, int, int) {
      best = min(best, static_cast<uint32_t>(shared_state().return_keys[index]) << 16 | index);
    });
    best = __reduce_min_sync(0xffffffffu, best);
    if (static_cast<int>(best >> 16) >= complete) return look_at_next_slot();
    const int chosen = static_cast<int>(best & 0xffffu);
    int base = 0;
    for (int peer = 0; peer < params.peers.num_ranks; ++peer) {
      if (peer == params.peers.rank) continue;
      const Block block = tokens_of(shared_state().sources.num_tokens[peer]);
      if (chosen >= base && chosen < base + block.count) {
        home = peer;
        token = block.first + chosen - base;
      }
      base += block.count;
    }
    if (lane == 0) shared_state().return_keys[chosen] = kNothingToReturn;
    __syncwarp();
    slice = 0;
    routes = PartialRow{params, lane}.routes_of(home, token);
  }

  // A slice of it, or its flags once the slices have had the time to arrive.
  __device__ __forceinline__ void continue_token() {
    const int slices = layout::NumPartialSlices(params.hidden);
    if (slice < slices) {
      const PartialRow row{params, lane};
      const PartialRow::Slice at = row.slice_at(token * slices + slice, slices);
      PartialRow::Columns sum = {};
      row.add_up<kRowsAtOnce>(routes, at, sum);
      row.store_partial(home, at, sum);
      if (++slice == slices) settled_at_ns = ptx::globaltimer_ns() + 2 * kSettleNs;
    } else if (has_settled(settled_at_ns)) {
      flag(slices);
      home = -1;
    }
  }

  __device__ __forceinline__ void flag(int slices) const {
    __syncwarp();
    if (waiter.gave_up()) return;
    uint32_t* flags = partial_flags(params, params.peers.rank, home) + token * slices;
    ptx::fence_acq_rel_sys();
    for (int i = lane; i < slices; i += 32) ptx::st_relaxed_sys(flags + i, params.step);
  }

  // One look at the flags of the first slot that was not complete.
  __device__ __forceinline__ void look_at_next_slot() {
    if (complete == params.num_slots) return;
    const int quads = params.local.fc2_done_stride / 4;
    const int begin = static_cast<int>(tile_begin(params)[complete]) * quads;
    const int end = static_cast<int>(tile_begin(params)[complete + 1]) * quads;
    bool there = true;
#pragma unroll 1
    for (int i = begin + lane; i < end && there; i += 32) {
      there = quad_is_there(i, quads);
    }
    if (!__all_sync(0xffffffffu, there)) return;
    ptx::fence_acq_rel_gpu();
    ++complete;
  }

  // Four flags; those behind the row's last tile are never set.
  __device__ __forceinline__ bool quad_is_there(int i, int quads) const {
    const uint4 flags = ptx::ld_relaxed_gpu_v4(params.local.fc2_done + 4 * i);
    const int left = params.hidden / 64 - 4 * (i % quads);
    return flags.x == params.step && (left < 2 || flags.y == params.step) &&
           (left < 3 || flags.z == params.step) && (left < 4 || flags.w == params.step);
  }
};

}  // namespace expertd::cuda::moe_layer
