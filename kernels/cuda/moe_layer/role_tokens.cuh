#pragma once

#include "kernels/cuda/moe_layer/first_tokens.cuh"
#include "kernels/cuda/moe_layer/tile_rows.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"

// Warps that bring the token rows of each tile into the ring. In narrow variants they take stages
// in turns, warp w every kTokenWarps-th; in wide ones each brings a part of every stage, so that a
// tile's first is there sooner. For FC1 they gather rows of x, 128-byte swizzled, as wgmma reads
// them: a stage is announced when its copies have landed and are visible to wgmma, and meanwhile
// the warp starts its next. For FC2 the rows of h lie ready in that form and bulk copies bring
// them; a tile's first stage waits until the intermediate of its tokens is complete. Rows past the
// tile's last are whatever was there: they end in columns that nobody stores. K past the matrix's
// end, where weights are zero, becomes zeros.
namespace expertd::cuda::moe_layer {

// kTokens: most rows of a tile.
template <int kTokens>
struct TokenRole {
  using Rows = TileRows<kTokens>;
  // Warps that share a stage, and how many stages on a warp's next one is.
  static constexpr int kSharers = HasOneRing(kTokens) ? 1 : kTokenWarps;
  static constexpr int kTurns = kTokenWarps / kSharers;
  // A warp copies 128 bytes of four rows at once; every kSharers-th such group is its own.
  static constexpr int kRowGroups = kTokens / 4 / kSharers;

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;  // 0..kTokenWarps-1
  int lane;
  PipelineState stage;  // this warp's next one
  PipelineState slot;
  int ahead;         // stages from the current tile's first to it
  bool leads;        // leaves what those who store the tile's results need
  uint32_t pending;  // barrier of the stage whose copies are under way, or kNoBarrier
  uint32_t asked;    // to arrive on when the first tokens have been asked for, or kNoBarrier

  __device__ __forceinline__ TokenRole(const MoeLayerParams& p, int token_warp, int token_lane)
      : params(p),
        waiter{p},
        warp(token_warp),
        lane(token_lane),
        ahead(token_warp % kTurns),
        leads(token_warp % kTurns == 0),
        pending(kNoBarrier),
        asked(token_warp == 0 ? tokens_asked_barrier() : kNoBarrier) {
    stage.index = ahead;
  }

  // Which of those that share a stage this warp is.
  __device__ __forceinline__ int part() const { return kSharers > 1 ? warp : 0; }

  __device__ __forceinline__ void wait_for_fc1(int token_tile) const {
    const int row_tiles = params.intermediate / 32;
    const uint32_t* done = params.local.fc1_done + token_tile * params.local.fc1_done_stride;
    waiter.wait_for_ctas(kWaitFc1, token_tile, [&] {
      uint32_t found = params.step;
      for (int i = lane; i < row_tiles; i += 32) {
        const uint32_t value = ptx::ld_relaxed_gpu(done + i);
        if (value != params.step) found = value;
      }
      return found;
    });
  }

  __device__ __forceinline__ void next_stage() {
    ahead += kTurns;
    for (int i = 0; i < kTurns; ++i) stage.advance(params.num_stages);
  }

  // Zeros for the 64 of K behind the matrix's end that share a unit with the last.
  __device__ __forceinline__ void zero_block(int width, int block) const {
    if (part() != 0) return;
    const uint32_t to =
        token_stage_address(params, stage.index) + block * (width * 128) + lane * 16;
    for (int i = 0; i < width / 4; ++i) ptx::st_shared_zero_v4(to + i * 512);
    ptx::fence_proxy_async_shared();
  }

  // The pending stage's copies, all groups but the last kLater, have landed: says so.
  template <int kLater>
  __device__ __forceinline__ void announce_pending() {
    if (pending == kNoBarrier) return;
    ptx::cp_async_wait<kLater>();
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(pending);
    pending = kNoBarrier;
  }

  // The weights behind the first stage's wait for this. Warp 0 has a part in every first stage.
  __device__ __forceinline__ void say_asked() {
    if (asked != kNoBarrier && lane == 0) ptx::mbarrier_arrive(asked);
    asked = kNoBarrier;
  }

  // What this warp's next stage is announced on.
  __device__ __forceinline__ uint32_t full() const {
    return HasOneRing(kTokens) ? full_barrier(stage.index) : token_full_barrier(stage.index);
  }

  // The next stage's place is free. Copies under way must not wait for those who wait for them.
  __device__ __forceinline__ void wait_empty() {
    const uint32_t barrier = token_empty_barrier(stage.index);
    if (__all_sync(0xffffffffu, ptx::mbarrier_test_wait(barrier, stage.phase ^ 1u))) return;
    announce_pending<0>();
    waiter.wait(barrier, stage.phase ^ 1u);
    __syncwarp();
  }

  // Blocks of 64 of K of this warp's rows. `source` [row group]: where the lane's row begins; `to`,
  // `from`: the lane's chunk of the first group's row, and of row 0.
  template <int kBlocks>
  __device__ __forceinline__ static void copy_rows(uint32_t to, uint32_t block_bytes,
                                                   const uint32_t (&source)[kRowGroups],
                                                   int last_row, const char* from) {
    constexpr int kSwizzles = kSharers == 1 ? 2 : 1;  // even and odd groups: they differ in one bit
    uint32_t targets[kSwizzles][kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int odd = 0; odd < kSwizzles; ++odd) {
        targets[odd][block] = (to + block * block_bytes) ^ (odd * 64u);
      }
    }
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      if (4 * kSharers * group > last_row) break;
      const char* row = from + uint64_t{source[group]} * 16;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        ptx::cp_async_16(targets[group % kSwizzles][block] + kSharers * group * 512,
                         row + block * 128);
      }
    }
  }

  // FC1: from x, or from what the ranks sent.
  __device__ __forceinline__ void gather(TileSlot& tile, const Rows& rows) {
    const uint16_t* tokens = params.peers.num_ranks > 1 ? params.local.tokens : params.x;
    const int num_stages = num_stages_of(tile);
    const uint32_t block_bytes = tile.width * 128;
    const int last_row = tile.rows - 1;
    const int first_row = 4 * part() + (lane >> 3);
    uint32_t source[kRowGroups];
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int row = min(4 * kSharers * group + first_row, last_row);
      source[group] = __shfl_sync(0xffffffffu, rows.source[4 * kSharers * group / 32], row & 31);
    }
    const int copied_row = last_row - 4 * part();  // a group is copied if it begins up to here
    const uint32_t in_stage = first_row * 128 + (((lane & 7) ^ first_row) << 4);
    for (; ahead < num_stages; next_stage()) {
      wait_empty();
      const int blocks = params.hidden / 64 - ahead * kStageBlocks;
      const int column = ahead * (kStageK * 2) + (lane & 7) * 16;
      const char* from = reinterpret_cast<const char*>(tokens) + column;
      uint32_t to = token_stage_address(params, stage.index) + in_stage;
      if (blocks >= kStageBlocks) {
        copy_rows<kStageBlocks>(to, block_bytes, source, copied_row, from);
      } else {
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          copy_rows<1>(to, block_bytes, source, copied_row, from);
          to += block_bytes;
          from += 128;
        }
        if (blocks % 2 != 0) zero_block(tile.width, blocks);
      }
      ptx::cp_async_commit();
      say_asked();
      announce_pending<1>();
      pending = full();
    }
    if (leads) rows.leave_in(tile, lane);  // late: the factor comes from device memory
    announce_pending<0>();
  }

  __device__ __forceinline__ void copy_intermediate(const TileSlot& tile) {
    __syncwarp();
    ptx::fence_proxy_async_global();
    const int num_stages = num_stages_of(tile);
    const uint32_t block_bytes = tile.rows * 128;
    const char* h = reinterpret_cast<const char*>(params.local.h) +
                    int64_t{tile.first_route} * params.intermediate * 2;
    for (; ahead < num_stages; next_stage()) {
      wait_empty();
      const int first_block = ahead * kStageBlocks;
      const int blocks = min(params.intermediate / 64 - first_block, kStageBlocks);
      if (blocks % 2 != 0) zero_block(tile.width, blocks);
      __syncwarp();
      const uint32_t barrier = full();
      const int own_blocks = (blocks + kSharers - 1 - part()) / kSharers;
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, own_blocks * block_bytes);
      __syncwarp();
      if (lane < blocks && lane % kSharers == part()) {
        ptx::bulk_copy(token_stage_address(params, stage.index) + lane * (tile.width * 128),
                       h + (first_block + lane) * block_bytes, block_bytes, barrier);
      }
    }
  }

  __device__ __forceinline__ void bring(TileSlot& tile) {
    if (ahead < num_stages_of(tile)) {
      const bool is_fc1 = tile.tile.phase == Phase::kFc1;
      // Weights do not wait where tokens have to.
      if (!is_fc1 || params.peers.num_ranks > 1) say_asked();
      Rows rows;
      rows.find(params, tile, is_fc1, leads, lane);
      if (is_fc1) {
        if (params.peers.num_ranks > 1) rows.wait_for_tokens(params, tile, lane);
        gather(tile, rows);
      } else {
        wait_for_fc1(tile.tile.token_tile);  // while the rows' routes are on their way
        if (leads) rows.leave_in(tile, lane);
        copy_intermediate(tile);
      }
    }
    ahead -= num_stages_of(tile);
    leads = ahead == 0;
  }

  // Stages of the first tile that the multiplying warps have brought. They wait for them by
  // themselves.
  __device__ __forceinline__ void pass_first_tokens() {
    const int stages = first_token_stages(params, shared_state().tiles[0]);
    if (stages > 0) say_asked();
    for (; ahead < stages; next_stage()) {
      if (lane == 0) ptx::mbarrier_arrive(full());
    }
  }

  __device__ __forceinline__ void run() {
    pass_first_tokens();
    for (;;) {
      waiter.wait(tile_full_barrier(slot.index), slot.phase);
      __syncwarp();
      TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) break;
      bring(tile);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_empty_barrier(slot.index));
      slot.advance(kTileSlots);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
