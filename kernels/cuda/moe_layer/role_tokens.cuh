#pragma once

#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"

// Warps that gather the rows of each token tile into the ring, in turns: warp w takes every
// kTokenWarps-th stage. Rows come from x for FC1 and from h for FC2 and lie 128-byte swizzled, as
// wgmma reads them; rows past the tile's last and K past the matrix's end become zeros. A stage is
// announced when its copies have landed and are visible to wgmma. The first stage of an FC2 tile
// waits until the intermediate of its tokens is complete.
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

  // What a lane knows of the tile's rows l, l + 32, ... : their routes and where they begin, in
  // units of 16 bytes from the tensor's begin. And one of the tile's factors.
  struct Rows {
    uint32_t route[kLaneRows];
    uint32_t source[kLaneRows];
    float factor;
  };

  __device__ __forceinline__ void find_rows(const TileSlot& tile, bool is_fc1, uint32_t row_chunks,
                                            Rows& rows) const {
    const int row_tiles = is_fc1 ? params.intermediate / 32 : params.hidden / 64;
    const float* factors = (is_fc1 ? params.fc1_factors : params.fc2_factors) +
                           (int64_t{tile.tile.slot} * row_tiles + tile.tile.first_row_tile) * 2;
    rows.factor = ahead == 0 && lane < 2 * tile.tile.num_row_tiles ? factors[lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = lane + 32 * i;
      rows.route[i] = 0;
      rows.source[i] = 0;
      if (row >= tile.rows) continue;
      const uint32_t position = tile.first_route + row;
      rows.route[i] = sorted_routes(params)[position];
      const uint32_t source =
          is_fc1 ? rows.route[i] / static_cast<uint32_t>(params.top_k) : position;
      rows.source[i] = source * row_chunks;
    }
  }

  // By the warp that has the tile's first stage, for those who store results.
  __device__ __forceinline__ void leave_rows(TileSlot& tile, const Rows& rows) const {
    if (lane < 2 * tile.tile.num_row_tiles) tile.factors[lane / 2][lane % 2] = rows.factor;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (lane + 32 * i < tile.rows) tile.route[lane + 32 * i] = rows.route[i];
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

  // K range of one stage of all rows: `from` is the lane's chunk of it in row 0. A warp copies 128
  // bytes of four rows at once. kTail: only the first `blocks` of the four 128-byte blocks are
  // there.
  template <bool kTail>
  __device__ __forceinline__ void copy_stage(int width, int rows, const char* from,
                                             const uint32_t (&source)[kLaneRows],
                                             int blocks) const {
    const int first_row = lane >> 3;
    const uint32_t block_bytes = width * 128;
    // Rows r and r + 4 differ in one bit of the swizzle.
    uint32_t to = token_stage_address(params, stage.index) + first_row * 128 +
                  (((lane & 7) ^ first_row) << 4);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll 2
      for (int row = 32 * i; row < min(width, 32 * i + 32); row += 8) {
#pragma unroll
        for (int r = 0; r < 8; r += 4) {
          const uint32_t offset = __shfl_sync(0xffffffffu, source[i], (row & 31) + r + first_row);
          const char* row_from = from + uint64_t{offset} * 16;
          const uint32_t row_to = r == 0 ? to : (to ^ 64u) + 512;
          const uint32_t bytes = row + r + first_row < rows ? 16 : 0;
#pragma unroll
          for (int block = 0; block < kStageK / 64; ++block) {
            ptx::cp_async_16(row_to + block * block_bytes, row_from + block * 128,
                             kTail && block >= blocks ? 0 : bytes);
          }
        }
        to += 1024;
      }
    }
  }

  __device__ __forceinline__ void gather(TileSlot& tile) {
    const int num_stages = num_stages_of(tile);
    if (ahead < num_stages) {
      const bool is_fc1 = tile.tile.phase == Phase::kFc1;
      const int k_end = is_fc1 ? params.hidden : params.intermediate;
      const char* base = reinterpret_cast<const char*>(is_fc1 ? params.x : params.local.h);
      const int width = tile.width;
      const int rows = tile.rows;
      Rows known;
      find_rows(tile, is_fc1, k_end / 8, known);
      if (!is_fc1) wait_for_fc1(tile.tile.token_tile);
      for (; ahead < num_stages; ahead += kTokenWarps) {
        waiter.wait(token_empty_barrier(stage.index), stage.phase ^ 1u);
        __syncwarp();
        const int blocks = (k_end - ahead * kStageK) / 64;
        const char* from = base + ahead * (kStageK * 2) + (lane & 7) * 16;
        if (blocks >= kStageK / 64) {
          copy_stage<false>(width, rows, from, known.source, blocks);
        } else {
          copy_stage<true>(width, rows, from, known.source, blocks);
        }
        if (ahead == 0) leave_rows(tile, known);
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
