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
  static constexpr int kTokens = Largest<kWidths...>();
  static constexpr bool kOneRing = HasOneRing(kTokens);
  using Packed = PackedFragment<kFormat>;
  // Up to this width registers allow two blocks of K32 in a group of wgmma; which width that is
  // depends on what else the variant holds.
  static constexpr int kWideGroupTokens = kTokens == 64 ? 48 : 40;
  template <int kWidth>
  using Accumulators = float[kWidth / 2];

  const MoeLayerParams& params;
  Waiter waiter;
  int kept_group;
  int kept_warp;
  uint32_t codes_offset;   // in a stage: of the thread's codes of the first unit
  uint32_t scales_offset;  // and of its rows' scales
  PipelineState stage;
  PipelineState slot;

  __device__ __forceinline__ ExpertRole(const MoeLayerParams& p, int warp_index, int l)
      : params(p),
        waiter{p},
        kept_group(warp_index / 4),
        kept_warp(warp_index % 4),
        codes_offset(group() * kUnit + (warp() * 32 + l) * 16),
        scales_offset(group() * kUnit + layout::ScaleWordOffset(kFormat, warp() * 16 + l / 4, 0)) {}

  // The warpgroup, and the warp in it. Wide variants are short of registers.
  __device__ __forceinline__ int group() const {
    return kOneRing ? kept_group : static_cast<int>(threadIdx.x / 128);
  }
  __device__ __forceinline__ int warp() const {
    return kOneRing ? kept_warp : static_cast<int>(threadIdx.x / 32 % 4);
  }

  __device__ __forceinline__ void wait_tokens() const {
    if constexpr (!kOneRing) waiter.wait(token_full_barrier(stage.index), stage.phase);
  }
  __device__ __forceinline__ void wait_stage() const {
    waiter.wait(full_barrier(stage.index), stage.phase);
  }

  __device__ __forceinline__ uint32_t stage_address() const {
    return weight_stage_address<kFormat, kTokens>(stage.index);
  }
  __device__ __forceinline__ void load(Packed& packed, int unit) const {
    const uint32_t base = stage_address() + unit * (layout::kGroupTiles * kUnit);
    packed.load(base + codes_offset, base + scales_offset);
  }

  __device__ __forceinline__ void release_weights() {
    if (ptx::elect_one()) ptx::mbarrier_arrive(empty_barrier(stage.index));
    stage.advance(params.num_stages);
  }
  __device__ __forceinline__ static void release(uint32_t barrier) {
    if (ptx::elect_one()) ptx::mbarrier_arrive(barrier);
  }

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

  // acc += unit x tokens. `after_first_group`: what was multiplied before this unit has ended.
  template <int kWidth, typename Then>
  __device__ __forceinline__ void multiply(Accumulators<kWidth>& acc, const Packed& packed,
                                           uint64_t tokens, Then after_first_group) const {
    const ScaleFragment<kFormat> scale(packed);
    if constexpr (kWidth <= kWideGroupTokens) {
      multiply_group<kWidth, 0, 2>(acc, packed, scale, tokens);
      after_first_group();
      multiply_group<kWidth, 2, 2>(acc, packed, scale, tokens);
    } else {
      multiply_group<kWidth, 0, 1>(acc, packed, scale, tokens);
      after_first_group();
      multiply_group<kWidth, 1, 1>(acc, packed, scale, tokens);
      multiply_group<kWidth, 2, 1>(acc, packed, scale, tokens);
      multiply_group<kWidth, 3, 1>(acc, packed, scale, tokens);
    }
  }

  __device__ __forceinline__ uint64_t token_descriptor() const {
    const uint32_t address = kOneRing ? stage_address() + WeightStageBytes(kFormat)
                                      : token_stage_address(params, stage.index);
    return ptx::descriptor(__shfl_sync(0xffffffffu, address >> 4, 0));
  }

  // The current stage's first unit. Both are in registers when its first group is on its way: the
  // weights are released, and the next stage is the current one. `held`: what to arrive on when the
  // tokens of the stage before have been multiplied; becomes this stage's. Returns the tokens of
  // the second unit.
  template <int kWidth>
  __device__ __forceinline__ uint64_t multiply_first(Accumulators<kWidth>& acc, const Packed& first,
                                                     Packed& second, uint32_t& held) {
    load(second, 1);  // garbage if the stage has one unit
    wait_tokens();
    const uint64_t tokens_first = token_descriptor();
    const uint32_t current = token_empty_barrier(stage.index);
    multiply<kWidth>(acc, first, tokens_first, [&] {
      release(held);
      held = ptx::opaque(current);  // or ptxas loses sight of the place being the same in all lanes
      release_weights();
    });
    return tokens_first + 2 * (kWidth * 8);
  }
  template <int kWidth>
  __device__ __forceinline__ void multiply_second(Accumulators<kWidth>& acc, const Packed& second,
                                                  uint64_t tokens_second) const {
    multiply<kWidth>(acc, second, tokens_second, [] {});
  }

  // A tile's `left` units; the last stage may have one. Narrow variants are short of instruction
  // slots: the last stage's second unit is apart from the loop. In wide ones that copy makes ptxas
  // order all multiplications.
  template <int kWidth>
  __device__ __forceinline__ void multiply_tile(Accumulators<kWidth>& acc, int left,
                                                uint32_t& held) {
    Packed first, second;
    wait_stage();
    load(first, 0);
    if constexpr (kOneRing) {
      uint64_t tokens_second;
#pragma unroll 1
      for (;;) {
        tokens_second = multiply_first<kWidth>(acc, first, second, held);
        left -= 2;
        if (left <= 0) break;
        wait_stage();
        load(first, 0);
        multiply_second<kWidth>(acc, second, tokens_second);
      }
      if (left == 0) multiply_second<kWidth>(acc, second, tokens_second);
    } else {
#pragma unroll 1
      do {
        const uint64_t tokens_second = multiply_first<kWidth>(acc, first, second, held);
        left -= 2;
        if (left > 0) {
          wait_stage();
          load(first, 0);
        }
        if (left >= 0) multiply_second<kWidth>(acc, second, tokens_second);
      } while (left > 0);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void run_tile(const TileSlot& tile) {
    Accumulators<kWidth> acc;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) acc[i] = 0.0f;
    uint32_t held = unwatched_barrier();
    multiply_tile<kWidth>(acc, tile.num_units, held);
    ptx::wgmma_wait<0>();
    release(held);
    const int row_tile = tile.tile.first_row_tile + group();
    if (tile.tile.phase == Phase::kFc1) {
      store_intermediate<kWidth>(params, tile, acc, row_tile, warp(), ptx::lane_id());
    } else {
      store_output<kWidth>(params, tile, acc, row_tile, warp(), ptx::lane_id());
    }
  }

  // A tile that is too low for this warpgroup leaves it idle.
  __device__ __forceinline__ void skip_tile(const TileSlot& tile) {
    for (int i = num_stages_of(tile); i > 0; --i) {
      wait_stage();
      wait_tokens();
      release(token_empty_barrier(stage.index));
      release_weights();
    }
  }

  // Returns the order in which this CTA came to the list's end.
  __device__ __forceinline__ uint32_t run() {
    for (;;) {
      waiter.wait(tile_full_barrier(slot.index), slot.phase);
      const TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) return tile.first_route;
      const int own = kOneRing ? group() : __shfl_sync(0xffffffffu, group(), 0);
      if (own < tile.tile.num_row_tiles) {
        const int width = __shfl_sync(0xffffffffu, tile.width, 0);
        (void)((width == kWidths && (run_tile<kWidths>(tile), true)) || ...);
      } else {
        skip_tile(tile);
      }
      __syncwarp();
      release(tile_done_barrier(slot.index));
      slot.advance(kTileSlots);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
