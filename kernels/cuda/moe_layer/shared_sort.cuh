#pragma once

#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// What the CTAs of a rank tell each other when they share the sort: how many routes of each slot
// are in a CTA's part, and that it has placed them. All of them meet twice; a flag of each CTA and
// meeting holds the step in which it has come. A CTA that gave up, here or while it waited for
// routes, comes to no meeting, and those who wait for it end with it.
namespace expertd::cuda::moe_layer {

struct SharedSort {
  // Meetings.
  static constexpr int kCounted = 0;
  static constexpr int kPlaced = 1;
  static_assert(layout::kSortMeetings == kPlaced + 1);
  // Of a lane and of a warp: all are loaded at once.
  static constexpr int kLaneFlags = (layout::kMaxCtas + 31) / 32;
  static constexpr int kWarpRows = (layout::kMaxCtas + kRoutingWarps - 1) / kRoutingWarps;

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;
  int lane;

  __device__ __forceinline__ uint32_t* counts_of(int cta) const {
    return params.local.sort_counts + int64_t{cta} * params.num_slots;
  }

  // For tests: this CTA stays away.
  __device__ __forceinline__ bool stays_away(int meeting) const {
    const bool stalled =
        params.stall == kStallCount || (params.stall == kStallPlace && meeting == kPlaced);
    return stalled && blockIdx.x == 0;
  }

  // All warps that route; what every CTA has written before is visible after it. False: some CTA
  // gave up, and so has this one.
  __device__ __forceinline__ bool meet(int meeting) const {
    uint32_t* flags = params.local.sort_flags + meeting * layout::kMaxCtas;
    const int ctas = static_cast<int>(gridDim.x);
    sync_routing();
    if (warp == 0) {
      if (lane == 0 && !waiter.gave_up() && !stays_away(meeting)) {
        ptx::fence_acq_rel_gpu();
        ptx::st_relaxed_gpu(flags + blockIdx.x, params.step);
      }
      __syncwarp();
      Awaited what = {kWaitSort, 0, params.peers.rank};
      (void)waiter.poll_for_step(what, [&] {
        uint32_t steps[kLaneFlags];
#pragma unroll
        for (int i = 0; i < kLaneFlags; ++i) {
          const int cta = lane + 32 * i;
          steps[i] = cta < ctas ? ptx::ld_relaxed_gpu(flags + cta) : params.step;
        }
        uint32_t found = params.step;
#pragma unroll
        for (int i = 0; i < kLaneFlags; ++i) {
          if (steps[i] == params.step) continue;
          found = steps[i];
          what.tile = lane + 32 * i;
        }
        return found;
      });
      ptx::fence_acq_rel_gpu();
    }
    sync_routing();
    return !waiter.gave_up();
  }

  // All threads that route, each where it was in rank_warps; ends with a barrier. From the CTA's
  // total of each slot, in route_begin[slot + 1], makes that of all CTAs there, and of the CTAs
  // before this one in tile_begin[slot + 1]. False: gave up, and all are zero.
  __device__ __forceinline__ bool add_up() const {
    const bool tells = !stays_away(kCounted);
    for (int slot = warp * 32 + lane; slot < params.num_slots; slot += kRoutingThreads) {
      if (tells) counts_of(blockIdx.x)[slot] = route_begin(params)[slot + 1];
      route_begin(params)[slot + 1] = 0;
      tile_begin(params)[slot + 1] = 0;
    }
    if (!meet(kCounted)) return false;
    add_rows();
    sync_routing();
    return true;
  }

  // Warp w adds the rows of CTAs w, w + kRoutingWarps, ...
  __device__ __forceinline__ void add_rows() const {
    const int ctas = static_cast<int>(gridDim.x);
    const int me = static_cast<int>(blockIdx.x);
    for (int slot = lane; slot < params.num_slots; slot += 32) {
      uint32_t routes[kWarpRows];
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const int cta = warp + i * kRoutingWarps;
        routes[i] = cta < ctas ? __ldcg(counts_of(cta) + slot) : 0;
      }
      uint32_t all = 0, before = 0;
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        all += routes[i];
        if (warp + i * kRoutingWarps < me) before += routes[i];
      }
      if (all != 0) atomicAdd(route_begin(params) + slot + 1, all);
      if (before != 0) atomicAdd(tile_begin(params) + slot + 1, before);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
