#pragma once

#include "kernels/cuda/moe_layer/dequantise.cuh"
#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

// Four warpgroups multiply: warpgroup g takes the g-th 64-row tile of each claimed tile, if there
// is one. Weights go from the ring to registers, are expanded there and are wgmma's A operand;
// tokens are its B operand in the ring. K is summed in one order whatever the tile, so a row's bits
// do not depend on its neighbours.
namespace expertd::cuda::moe_layer {

template <layout::WeightFormat kFormat, int... kWidths>
struct ExpertRole {
  static constexpr uint32_t kUnit = layout::UnitBytes(kFormat);
  static constexpr bool kJoined = HasJoinedBarrier(Largest<kWidths...>());
  using Packed = PackedFragment<kFormat>;
  // Up to this width registers allow two blocks of K32 in a group of wgmma.
  static constexpr int kWideGroupTokens = 40;
  template <int kWidth>
  using Accumulators = float[kWidth / 2];

  const MoeLayerParams& params;
  Waiter waiter;
  int group;  // warpgroup
  int warp;   // in the warpgroup
  int lane;
  PipelineState stage;
  PipelineState tokens;
  PipelineState slot;

  __device__ __forceinline__ void wait_tokens() const {
    if constexpr (!kJoined) waiter.wait(token_full_barrier(tokens.index), tokens.phase);
  }
  __device__ __forceinline__ void wait_stage() const {
    waiter.wait(full_barrier(stage.index), stage.phase);
  }

  __device__ __forceinline__ void load(Packed& packed, int unit) const {
    const uint32_t base =
        weight_stage_address<kFormat>(stage.index) + (unit * layout::kGroupTiles + group) * kUnit;
    packed.load(base + (warp * 32 + lane) * 16,
                base + layout::ScaleWordOffset(kFormat, warp * 16 + lane / 4, 0));
  }

  __device__ __forceinline__ void release_weights() {
    if (lane == 0) ptx::mbarrier_arrive(empty_barrier(stage.index));
    stage.advance(params.num_stages);
  }
  // What the warp arrives on when it has multiplied the current stage, or kNoBarrier.
  __device__ __forceinline__ uint32_t tokens_held() const {
    return lane == 0 ? token_empty_barrier(tokens.index) : kNoBarrier;
  }
  __device__ __forceinline__ static void release(uint32_t barrier) {
    if (barrier != kNoBarrier) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void next_tokens() { tokens.advance(params.num_token_stages); }

  // acc += K [32 kFirst, 32 (kFirst + kBlocks)) of a unit x tokens: one group of wgmma, in flight
  // while the next is expanded.
  template <int kWidth, int kFirst, int kBlocks>
  __device__ __forceinline__ void multiply_group(Accumulators<kWidth>& acc, const Packed& packed,
                                                 const ScaleFragment<kFormat>& scale,
                                                 uint64_t tokens) const {
    uint32_t a[2 * kBlocks][4];
    dequantise_block<kFormat, kFirst>(packed, scale, a[0], a[1]);
    if constexpr (kBlocks == 2) dequantise_block<kFormat, kFirst + 1>(packed, scale, a[2], a[3]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2 * kBlocks; ++step) {
      const int k16 = 2 * kFirst + step;  // 64 of K lie kWidth rows of 128 bytes apart
      ptx::wgmma<kWidth>(acc, a[step], tokens + k16 / 4 * (kWidth * 8) + k16 % 4 * 2);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }

  // acc += unit x tokens. `held`: token barrier of the stage before this one, whose last group has
  // ended after the first group here, or kNoBarrier.
  template <int kWidth>
  __device__ __forceinline__ void multiply(Accumulators<kWidth>& acc, const Packed& packed,
                                           uint64_t tokens, uint32_t held) const {
    const ScaleFragment<kFormat> scale(packed);
    if constexpr (kWidth <= kWideGroupTokens) {
      multiply_group<kWidth, 0, 2>(acc, packed, scale, tokens);
      release(held);
      multiply_group<kWidth, 2, 2>(acc, packed, scale, tokens);
    } else {
      multiply_group<kWidth, 0, 1>(acc, packed, scale, tokens);
      release(held);
      multiply_group<kWidth, 1, 1>(acc, packed, scale, tokens);
      multiply_group<kWidth, 2, 1>(acc, packed, scale, tokens);
      multiply_group<kWidth, 3, 1>(acc, packed, scale, tokens);
    }
  }

  __device__ __forceinline__ uint64_t token_descriptor() const {
    const uint32_t address = token_stage_address(params, tokens.index);
    return ptx::kDescriptor | __shfl_sync(0xffffffffu, address >> 4, 0);
  }

  // One stage: `first` is the first unit of it, and becomes that of the next stage.
  template <int kWidth>
  __device__ __forceinline__ void multiply_stage(Accumulators<kWidth>& acc, Packed& first,
                                                 Packed& second, int& left, uint32_t& held) {
    load(second, 1);  // garbage if the stage has one unit
    wait_tokens();
    const uint64_t tokens = token_descriptor();
    const uint32_t current = tokens_held();
    next_tokens();
    multiply<kWidth>(acc, first, tokens, held);
    held = current;
    release_weights();  // both units are in registers
    left -= 2;
    if (left > 0) {
      wait_stage();
      load(first, 0);
    }
    if (left >= 0) multiply<kWidth>(acc, second, tokens + 2 * (kWidth * 8), kNoBarrier);
  }

  template <int kWidth>
  __device__ __forceinline__ void run_tile(const TileSlot& tile) {
    Accumulators<kWidth> acc;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) acc[i] = 0.0f;
    uint32_t held = kNoBarrier;
    int left = tile.num_units;
    Packed first, second;
    wait_stage();
    load(first, 0);
#pragma unroll 1
    do {
      multiply_stage<kWidth>(acc, first, second, left, held);
    } while (left > 0);
    ptx::wgmma_wait<0>();
    release(held);
    const int row_tile = tile.tile.first_row_tile + group;
    if (tile.tile.phase == Phase::kFc1) {
      store_intermediate<kWidth>(params, tile, acc, row_tile, warp, ptx::lane_id());
    } else {
      store_output<kWidth>(params, tile, acc, row_tile, warp, ptx::lane_id());
    }
  }

  // A tile that is too low for this warpgroup leaves it idle.
  __device__ __forceinline__ void skip_tile(const TileSlot& tile) {
    for (int i = num_stages_of(tile); i > 0; --i) {
      wait_stage();
      release_weights();
      wait_tokens();
      release(tokens_held());
      next_tokens();
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      waiter.wait(tile_full_barrier(slot.index), slot.phase);
      const TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) break;
      if (group < tile.tile.num_row_tiles) {
        const int width = __shfl_sync(0xffffffffu, tile.width, 0);
        (void)((width == kWidths && (run_tile<kWidths>(tile), true)) || ...);
      } else {
        skip_tile(tile);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_done_barrier(slot.index));
      slot.advance(kTileSlots);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
