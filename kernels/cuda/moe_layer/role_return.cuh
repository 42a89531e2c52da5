#pragma once

#include "kernels/cuda/moe_layer/partial_row.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// Partial rows of the peers' tokens that can go back while FC2 still runs: FC2 goes slot after
// slot, and a token's partial row is due when the last slot that it needs here is complete. Of
// ranks that have many tokens (has_many_tokens) the announcing warp of each CTA returns those of
// the CTA's tokens (tokens_of) that are due early enough; combine returns the others, and what is
// left of one that is begun when the list ends.
namespace expertd::cuda::moe_layer {

__device__ __forceinline__ bool returns_early(const MoeLayerParams& params) {
  bool any = false;
#pragma unroll 1
  for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
    any |= rank != params.peers.rank && has_many_tokens(shared_state().sources.num_tokens[rank]);
  }
  return any && params.stall != kStallPartials;
}

// What is in SharedState::return_keys, by index (tokens of all peers, in rank order; those beyond
// the table are combine's): the last slot that the CTA's token needs here; from when it is begun
// kStored + the slices that are stored; kNothingToReturn when it has been flagged, or if there
// never was anything. Combine finishes what is begun when the list ends.
inline constexpr uint16_t kNothingToReturn = 0xffff;
inline constexpr uint16_t kStored = 0x8000;
static_assert(kMaxSlots < kStored, "a slot is no other key");

struct PartialSender {
  static constexpr int kRowsInFlight = 6;
  static constexpr int kRowsAtOnce = 12;   // between two looks at what else there is to do
  static constexpr int kTokensAtOnce = 4;  // most tokens between two fences

  const MoeLayerParams& params;
  Waiter waiter;
  int lane;
  bool active;
  int complete = 0;    // slots whose outputs are all there
  int num_stored = 0;  // tokens that are stored and not flagged
  uint64_t settled_at_ns = 0;
  // The token that is being returned, or -1.
  int home = -1;
  int token = 0;
  int index = 0;
  int slice = 0;  // the next one
  PartialRow::TokenRoutes routes;

  __device__ __forceinline__ PartialSender(const MoeLayerParams& p, int l)
      : params(p), waiter{p}, lane(l), active(returns_early(p)) {
    if (active) make_keys();
  }

  // (index, peer, token of it) of every token of the CTA that the table holds, a lane each.
  template <typename Visit>
  __device__ __forceinline__ void for_each_token(Visit visit) const {
    int base = 0;
#pragma unroll 1
    for (int peer = 0; peer < params.peers.num_ranks; ++peer) {
      if (peer == params.peers.rank) continue;
      const Block block = tokens_of(shared_state().sources.num_tokens[peer]);
#pragma unroll 1
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

  __device__ __forceinline__ void set_key(uint16_t key) const {
    if (lane == 0) shared_state().return_keys[index] = key;
    __syncwarp();
  }

  // The token that is due first of those whose keys are at least `from`; false if the lowest key is
  // not below `end`.
  __device__ __forceinline__ bool find_token(uint32_t from, uint32_t end) {
    uint32_t best = 0xffffffffu;  // key << 16 | index
    for_each_token([&](int i, int, int) {
      const uint32_t key = shared_state().return_keys[i];
      if (key >= from) best = min(best, key << 16 | static_cast<uint32_t>(i));
    });
    best = __reduce_min_sync(0xffffffffu, best);
    if (best >> 16 >= end) return false;
    index = static_cast<int>(best & 0xffffu);
    int base = 0;
#pragma unroll 1
    for (int peer = 0; peer < params.peers.num_ranks; ++peer) {
      if (peer == params.peers.rank) continue;
      const Block block = tokens_of(shared_state().sources.num_tokens[peer]);
      if (index >= base && index < base + block.count) {
        home = peer;
        token = block.first + index - base;
      }
      base += block.count;
    }
    return true;
  }

  // By the whole warp between looks at what else there is to do: stores slices of a token, or
  // begins one that is due, or flags those that are stored when they have had the time to arrive,
  // or looks at the next slot.
  __device__ __forceinline__ void step() {
    if (home >= 0) return continue_token();
    if (num_stored < kTokensAtOnce && find_token(0, complete)) {
      slice = 0;
      set_key(kStored);
      routes = PartialRow(params, lane).routes_of(home, token);
      return;
    }
    if (num_stored > 0 && has_settled(settled_at_ns)) return flag();
    look_at_next_slot();
  }

  __device__ __forceinline__ void continue_token() {
    const int slices = layout::NumPartialSlices(params.hidden);
    const PartialRow row(params, lane);
    const int end = min(slice + max(kRowsAtOnce / __popc(routes.here), 1), slices);
    char* to = row.destination(home, token);
    row.add_up_slices<kRowsInFlight>(
        routes, slice, end,
        [&](int at, const PartialRow::Columns& sum) { row.store_partial(to, at, sum); });
    slice = end;
    set_key(static_cast<uint16_t>(kStored + slice));
    if (slice < slices) return;
    home = -1;
    ++num_stored;
    settled_at_ns = ptx::globaltimer_ns() + 2 * kSettleNs;
  }

  __device__ __forceinline__ void flag() {
    const int slices = layout::NumPartialSlices(params.hidden);
    __syncwarp();
    ptx::fence_acq_rel_sys();
#pragma unroll 1
    for (; num_stored > 0; --num_stored) {
      find_token(kStored, kNothingToReturn);
      uint32_t* flags = partial_flags(params, params.peers.rank, home) + token * slices;
      for (int i = lane; i < slices; i += 32) ptx::st_relaxed_sys(flags + i, params.step);
      set_key(kNothingToReturn);
    }
    home = -1;
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
