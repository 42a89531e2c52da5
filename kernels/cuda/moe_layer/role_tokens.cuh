#pragma once

#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"

// Warps that gather the rows of each token tile into the ring, in turns: warp w takes every
// kTokenWarps-th stage. Rows come from x for FC1 and from h for FC2 and lie 128-byte swizzled, as wgmma
// reads them; rows past the tile's last and K past the matrix's end become zeros. A stage is announced
// when its copies have landed and are visible to wgmma. The first stage of an FC2 tile waits until the intermediate of its
// tokens is complete.
namespace expertd::cuda::moe_layer {

struct TokenRole {
  static constexpr int kLaneRows = (kMaxTokenTile + 31) / 32;

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;  // 0..kTokenWarps-1
  int lane;
  PipelineState stage;  // of this warp's next stage
  PipelineState slot;
  int ahead;  // stages from the current tile's first to it

  __device__ __forceinline__ TokenRole(const MoeLayerParams& p, int token_warp, int token_lane)
      : params(p), waiter{p}, warp(token_warp), lane(token_lane), ahead(token_warp) {
    stage.index = token_warp;
  }

  // Lane l holds the source rows of the tile's rows l, l + 32, ...; the warp that has the tile's first
  // stage also leaves the routes for those who store results.
  __device__ __forceinline__ void find_rows(TileSlot& tile, uint32_t (&source)[kLaneRows]) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = lane + 32 * i;
      const uint32_t position = tile.first_route + row;
      source[i] = 0;
      if (row >= tile.rows) continue;
      const uint32_t route = sorted_routes(params)[position];
      const uint32_t token = route / static_cast<uint32_t>(params.top_k);
      source[i] = tile.tile.phase == Phase::kFc1 ? token : position;
      if (ahead == 0) tile.route[row] = route;
    }
  }

  __device__ __forceinline__ void wait_for_fc1(int token_tile) const {
    const int row_tiles = params.intermediate / 32;
    const uint32_t* done = params.local.fc1_done + token_tile * params.local.fc1_done_stride;
    waiter.wait_for_step(kWaitFc1, token_tile, [&] {
      uint32_t found = params.step;
      for (int i = lane; i < row_tiles; i += 32) {
        const uint32_t value = ptx::ld_relaxed_gpu(done + i);
        if (value != params.step) found = value;
      }
      return found;
    });
  }

  // K range [k, k + kStageK) of all rows; a warp copies 128 bytes of four rows at once.
  __device__ __forceinline__ void copy_stage(const TileSlot& tile, const char* base, int64_t row_bytes,
                                             const uint32_t (&source)[kLaneRows], int k,
                                             int k_end) const {
    const int chunk = lane & 7;
    const uint32_t target = token_stage_address(params, stage.index);
    const uint32_t block_bytes = tile.width * 128;
    const bool tail = k + kStageK > k_end;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      for (int row = 32 * i + (lane >> 3); row < tile.width && row < 32 * i + 32; row += 4) {
        const uint32_t from_row = __shfl_sync(0xffffffffu, source[i], row & 31);
        const char* from = base + from_row * row_bytes + k * 2 + chunk * 16;
        const uint32_t to = target + row * 128 + ((chunk ^ (row & 7)) << 4);
        const uint32_t bytes = row < tile.rows ? 16 : 0;
#pragma unroll
        for (int block = 0; block < kStageK / 64; ++block) {
          const bool past_end = tail && k + block * 64 >= k_end;
          ptx::cp_async_16(to + block * block_bytes, past_end ? base : from + block * 128,
                           past_end ? 0 : bytes);
        }
      }
    }
  }

  __device__ __forceinline__ void gather(TileSlot& tile) {
    const int num_stages = tile.num_stages;
    if (ahead < num_stages) {
      uint32_t source[kLaneRows];
      find_rows(tile, source);
      const bool is_fc1 = tile.tile.phase == Phase::kFc1;
      if (!is_fc1) wait_for_fc1(tile.tile.token_tile);
      const int k_end = is_fc1 ? params.hidden : params.intermediate;
      const void* base = is_fc1 ? params.x : params.local.h;
      for (; ahead < num_stages; ahead += kTokenWarps) {
        waiter.wait(token_empty_barrier(stage.index), stage.phase ^ 1u);
        __syncwarp();
        copy_stage(tile, static_cast<const char*>(base), int64_t{2} * k_end, source, ahead * kStageK,
                   k_end);
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(token_full_barrier(stage.index));
        stage.advance(params.num_token_stages, kTokenWarps);
      }
    }
    ahead -= num_stages;
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      waiter.wait(tile_full_barrier(slot.index), slot.phase);
      __syncwarp();
      TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) break;
      gather(tile);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_empty_barrier(slot.index));
      slot.advance(kTileSlots);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
