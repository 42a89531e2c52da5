#pragma once

#include "kernels/cuda/moe_layer/role_dispatch.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// One warp tells the other CTAs that a tile's results are there: when all multiplying warps have
// stored theirs, one fence for all of them (it covers what this warp has observed) and a flag for
// each 64-row tile. The multiplying warps never wait for their own stores. While a tile is being
// computed the warp sends tokens to peers, if this step leaves that to it.
namespace expertd::cuda::moe_layer {

struct AnnounceRole {
  const MoeLayerParams& params;
  Waiter waiter;
  int lane;
  TokenSender tokens;
  PipelineState slot;

  __device__ __forceinline__ AnnounceRole(const MoeLayerParams& p, int announce_lane)
      : params(p), waiter{p}, lane(announce_lane), tokens(p, announce_lane) {}

  __device__ __forceinline__ uint32_t* flags_of(const Tile& tile) const {
    return tile.phase == Phase::kFc1
               ? params.local.fc1_done + tile.token_tile * params.local.fc1_done_stride
               : params.local.fc2_done + tile.token_tile * params.local.fc2_done_stride;
  }

  // What a tile's warps stored after one of its waits was given up is not announced.
  __device__ __forceinline__ bool may_announce(const Tile& tile) const {
    const StallPoint stall = tile.phase == Phase::kFc1 ? kStallFc1 : kStallFc2;
    return !waiter.gave_up() && params.stall != stall;
  }

  __device__ __forceinline__ void announce() {
    const Tile& tile = shared_state().tiles[slot.index].tile;
    if (lane < tile.num_row_tiles && may_announce(tile)) {
      ptx::fence_acq_rel_gpu();
      ptx::st_relaxed_gpu(flags_of(tile) + tile.first_row_tile + lane, params.step);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(tile_empty_barrier(slot.index));
    slot.advance(kTileSlots);
  }

  // As long as there are tokens to send, barriers are only looked at in between.
  __device__ __forceinline__ void run() {
    bool list_ended = false;
    bool described = false;  // the next tile is, and its results are waited for
    while (!list_ended || !tokens.done) {
      const uint32_t barrier =
          described ? tile_done_barrier(slot.index) : tile_full_barrier(slot.index);
      if (tokens.done) {
        waiter.wait(barrier, slot.phase);
      } else if (list_ended ||
                 !__all_sync(0xffffffffu, ptx::mbarrier_test_wait(barrier, slot.phase))) {
        tokens.send_next();
        continue;
      }
      if (described) {
        announce();
      } else {
        list_ended = shared_state().tiles[slot.index].rows < 0;
      }
      described = !described && !list_ended;
    }
  }
};

}  // namespace expertd::cuda::moe_layer
