#pragma once

#include "kernels/cuda/moe_layer/dequantise.cuh"
#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

// Four warpgroups multiply: warpgroup w takes the w-th 64-row tile of each claimed tile (none if the tile
// is lower). Weights go from the ring to registers, are expanded there and are wgmma's A operand; tokens
// are its B operand in the ring. K is summed in one order whatever the tile, so a row's bits do not depend
// on its neighbours.
namespace expertd::cuda::moe_layer {

template <layout::WeightFormat kFormat>
struct ExpertRole {
  static constexpr uint32_t kUnit = layout::UnitBytes(kFormat);
  static constexpr uint32_t kWeightStage = WeightStageBytes(kFormat);
  using Packed = PackedFragment<kFormat>;

  const MoeLayerParams& params;
  Waiter waiter;
  int group;  // warpgroup
  int warp;   // in the warpgroup
  int lane;
  PipelineState stage;
  PipelineState slot;

  __device__ __forceinline__ void wait_stage() {
    waiter.wait(full_barrier(stage.index), stage.phase);
  }

  __device__ __forceinline__ void load(Packed& packed, int unit) const {
    const uint32_t base = weight_stage(params, stage.index, kWeightStage) +
                          (unit * layout::kGroupTiles + group) * kUnit;
    const int thread = warp * 32 + lane;
    packed.load(base + thread * 16, base + layout::ScaleWordOffset(kFormat, warp * 16 + lane / 4, 0));
  }

  __device__ __forceinline__ void release(int index) const {
    if (lane == 0) ptx::mbarrier_arrive(empty_barrier(index));
  }

  // acc += unit x tokens, in two groups of wgmma: one is in flight while the next is expanded.
  // `released`: ring index of the stage before, whose last group has ended after the first group here;
  // or -1.
  __device__ __forceinline__ void multiply(float (&acc)[ptx::kAccumulators], const Packed& packed,
                                           uint64_t tokens, uint32_t n_index, int released) const {
    const ScaleFragment<kFormat> scale(packed);
    uint32_t a[4][4];
    dequantise_block<kFormat, 0>(packed, scale, a[0], a[1]);
    dequantise_block<kFormat, 1>(packed, scale, a[2], a[3]);
    ptx::wgmma_k64(acc, a, tokens, n_index);
    ptx::wgmma_wait<1>();
    if (released >= 0) release(released);
    dequantise_block<kFormat, 2>(packed, scale, a[0], a[1]);
    dequantise_block<kFormat, 3>(packed, scale, a[2], a[3]);
    ptx::wgmma_k64(acc, a, tokens + k64_step(n_index), n_index);
    ptx::wgmma_wait<1>();
  }

  // Descriptor units (16 bytes) from one 128-byte column of the token tile to the next.
  __device__ __forceinline__ static uint32_t k64_step(uint32_t n_index) { return (n_index + 1) * 64; }

  __device__ __forceinline__ uint64_t token_descriptor() const {
    const uint32_t address = token_stage(params, stage.index);
    const uint32_t low = __shfl_sync(0xffffffffu, address >> 4, 0) | ptx::kDescriptorLow;
    return static_cast<uint64_t>(ptx::kDescriptorHigh) << 32 | low;
  }

  __device__ __forceinline__ void run_tile(const TileSlot& tile, float (&acc)[ptx::kAccumulators]) {
#pragma unroll
    for (int i = 0; i < ptx::kAccumulators; ++i) acc[i] = 0.0f;
    const uint32_t n_index = __shfl_sync(0xffffffffu, tile.width / 8 - 1, 0);
    Packed first, second;
    int previous = -1;
    int left = tile.num_stages;
    wait_stage();
    if constexpr (kRecordTiming) {
      if (threadIdx.x == 0 && params.timing && slot.index == 0 && slot.phase == 0) {
        params.timing[blockIdx.x * kTimingMarks + kMarkFirstTile] = ptx::globaltimer_ns();
      }
    }
    load(first, 0);
#pragma unroll 1
    do {
      const uint64_t tokens = token_descriptor();
      const int current = stage.index;
      load(second, 1);
      multiply(acc, first, tokens, n_index, previous);
      stage.advance(params.num_stages);
      if (--left > 0) {
        wait_stage();
        load(first, 0);
      }
      multiply(acc, second, tokens + 2 * k64_step(n_index), n_index, -1);
      previous = current;
    } while (left > 0);
    ptx::wgmma_wait<0>();
    release(previous);
    const int row_tile = tile.tile.first_row_tile + group;
    if (tile.tile.phase == Phase::kFc1) {
      store_intermediate(params, tile, acc, row_tile, warp, ptx::lane_id());
    } else {
      store_output(params, tile, acc, row_tile, warp, ptx::lane_id());
    }
  }

  // A tile with fewer 64-row tiles than warpgroups leaves this one idle.
  __device__ __forceinline__ void skip_tile(const TileSlot& tile) {
    for (int i = 0; i < tile.num_stages; ++i) {
      wait_stage();
      release(stage.index);
      stage.advance(params.num_stages);
    }
  }

  __device__ __forceinline__ void run() {
    float acc[ptx::kAccumulators] = {};
    for (;;) {
      waiter.wait(tile_full_barrier(slot.index), slot.phase);
      const TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) break;
      if (group < tile.tile.num_row_tiles) {
        run_tile(tile, acc);
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
