#pragma once

#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"

// Three warps gather the rows of each token tile into the ring: rows of x for FC1, of h for FC2, 128-byte
// swizzled as wgmma reads them. Rows past the tile's last and K past the matrix's end become zeros. For an
// FC2 tile they wait until the intermediate of its tokens is complete. A stage is announced when its
// copies have landed; at most kMaxPending stages are on their way, and none is left unannounced when the
// warp has to wait for something else.
namespace expertd::cuda::moe_layer {

struct TokenRole {
  static constexpr int kMaxPending = 2;
  static constexpr int kRowsPerStep = 4 * kTokenWarps;  // a warp copies 128 bytes of 4 rows at once

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;  // 0..kTokenWarps-1
  int lane;
  PipelineState stage;
  PipelineState slot;
  int announced = 0;  // ring index of the oldest stage not announced
  int pending = 0;

  __device__ __forceinline__ void announce(int count) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    for (int i = 0; i < count; ++i) {
      if (lane == 0) ptx::mbarrier_arrive(full_barrier(announced));
      announced = announced + 1 == params.num_stages ? 0 : announced + 1;
    }
    pending -= count;
  }
  __device__ __forceinline__ void announce_all() {
    if (pending == 0) return;
    ptx::cp_async_wait<0>();
    announce(pending);
  }

  // Which row of which tensor each row of the tile is; every warp for the rows that it copies.
  __device__ __forceinline__ void find_rows(TileSlot& out) const {
    const int row = (lane >> 2) * kRowsPerStep + warp * 4 + (lane & 3);
    if (row >= out.width) return;
    const bool valid = row < out.rows;
    const uint32_t position = out.first_route + row;
    const uint32_t* routes = params.local.routes;
    const uint32_t route = valid ? routes[position] : 0;
    out.route[row] = route;
    const uint32_t token = route / static_cast<uint32_t>(params.top_k);
    out.source[row] = !valid ? 0 : out.tile.phase == Phase::kFc1 ? token : position;
  }

  __device__ __forceinline__ void wait_for_fc1(int token_tile) {
    announce_all();
    const int row_tiles = params.intermediate / 32;
    const uint32_t* done = params.local.fc1_done +
                           token_tile * params.local.fc1_done_stride;
    waiter.wait_for_step(kWaitFc1, token_tile, [&] {
      uint32_t found = params.step;
      for (int i = lane; i < row_tiles; i += 32) {
        const uint32_t value = ptx::ld_relaxed_gpu(done + i);
        if (value != params.step) found = value;
      }
      return found;
    });
  }

  // Copies this warp's rows of K range [k, k + kStageK).
  __device__ __forceinline__ void copy_stage(const TileSlot& tile, const char* source, int64_t row_bytes,
                                             int k, int k_end) const {
    const int chunk = lane & 7;
    const uint32_t base = token_stage(params, stage.index);
    const uint32_t block_bytes = tile.width * 128;
    const bool tail = k + kStageK > k_end;
    for (int row = warp * 4 + (lane >> 3); row < tile.width; row += kRowsPerStep) {
      const char* from = source + tile.source[row] * row_bytes + k * 2 + chunk * 16;
      const uint32_t to = base + row * 128 + ((chunk ^ (row & 7)) << 4);
      const uint32_t bytes = row < tile.rows ? 16 : 0;
#pragma unroll
      for (int block = 0; block < kStageK / 64; ++block) {
        const bool past_end = tail && k + block * 64 >= k_end;
        ptx::cp_async_16(to + block * block_bytes, past_end ? source : from + block * 128,
                         past_end ? 0 : bytes);
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void gather(const TileSlot& tile) {
    const bool is_fc1 = tile.tile.phase == Phase::kFc1;
    const int k_end = is_fc1 ? params.hidden : params.intermediate;
    const char* source = is_fc1 ? reinterpret_cast<const char*>(params.x)
                                : reinterpret_cast<const char*>(params.local.h);
    for (int i = 0; i < tile.num_stages; ++i) {
      const uint32_t empty = empty_barrier(stage.index);
      if (!__all_sync(0xffffffffu, ptx::mbarrier_test_wait(empty, stage.phase ^ 1u))) {
        announce_all();
        waiter.wait(empty, stage.phase ^ 1u);
      }
      copy_stage(tile, source, int64_t{2} * k_end, i * kStageK, k_end);
      stage.advance(params.num_stages);
      if (++pending > kMaxPending) {
        ptx::cp_async_wait<kMaxPending>();
        announce(1);
      }
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      const uint32_t tile_full = tile_full_barrier(slot.index);
      if (!__all_sync(0xffffffffu, ptx::mbarrier_test_wait(tile_full, slot.phase))) {
        announce_all();
        waiter.wait(tile_full, slot.phase);
      }
      TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) break;
      find_rows(tile);
      __syncwarp();
      if (tile.tile.phase == Phase::kFc2) wait_for_fc1(tile.tile.token_tile);
      gather(tile);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_empty_barrier(slot.index));
      slot.advance(kTileSlots);
    }
    announce_all();
  }
};

}  // namespace expertd::cuda::moe_layer
