#pragma once

#include "kernels/cuda/moe_layer/wait.cuh"

// One warp tells the other CTAs that a tile's results are there: when all multiplying warps have
// stored theirs, one fence for all of them (it covers what this warp has observed) and a flag for
// each 64-row tile. The multiplying warps never wait for their own stores.
namespace expertd::cuda::moe_layer {

struct AnnounceRole {
  const MoeLayerParams& params;
  Waiter waiter;
  int lane;
  PipelineState slot;

  __device__ __forceinline__ uint32_t* flags_of(const Tile& tile) const {
    return tile.phase == Phase::kFc1
               ? params.local.fc1_done + tile.token_tile * params.local.fc1_done_stride
               : params.local.fc2_done + tile.token_tile * params.local.fc2_done_stride;
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      waiter.wait(tile_full_barrier(slot.index), slot.phase);
      if (shared_state().tiles[slot.index].rows < 0) break;
      waiter.wait(tile_done_barrier(slot.index), slot.phase);
      const Tile& tile = shared_state().tiles[slot.index].tile;
      if (lane < tile.num_row_tiles) {
        ptx::fence_acq_rel_gpu();
        ptx::st_relaxed_gpu(flags_of(tile) + tile.first_row_tile + lane, params.step);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_empty_barrier(slot.index));
      slot.advance(kTileSlots);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
