#pragma once

#include "kernels/cuda/moe_layer/dequantise.cuh"
#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

// Two warpgroups multiply: warpgroup g takes the 64-row tiles g and g + 2 of each claimed tile, or what
// there is of them. Weights go from the ring to registers, are expanded there and are wgmma's A operand;
// tokens are its B operand in the ring. K is summed in one order whatever the tile, so a row's bits do not
// depend on its neighbours.
namespace expertd::cuda::moe_layer {

template <layout::WeightFormat kFormat>
struct ExpertRole {
  static constexpr uint32_t kUnit = layout::UnitBytes(kFormat);
  static constexpr uint32_t kWeightStage = WeightStageBytes(kFormat);
  using Packed = PackedFragment<kFormat>;
  using Accumulators = float[ptx::kRowTiles][ptx::kAccumulators];

  const MoeLayerParams& params;
  Waiter waiter;
  int group;  // warpgroup
  int warp;   // in the warpgroup
  int lane;
  PipelineState stage;
  PipelineState slot;

  // The tokens were written by ordinary copies and are read by wgmma: hence the fence.
  __device__ __forceinline__ void wait_stage() const {
    waiter.wait(full_barrier(stage.index), stage.phase);
    ptx::fence_proxy_async_shared();
  }

  // Both row tiles' shares of K unit `unit` of the stage; of the second one garbage if it is not there.
  __device__ __forceinline__ void load(Packed (&packed)[ptx::kRowTiles], int unit) const {
    const uint32_t base = weight_stage(params, stage.index, kWeightStage) +
                          (unit * layout::kGroupTiles + group) * kUnit;
    const uint32_t codes = base + (warp * 32 + lane) * 16;
    const uint32_t scales = base + layout::ScaleWordOffset(kFormat, warp * 16 + lane / 4, 0);
#pragma unroll
    for (int i = 0; i < ptx::kRowTiles; ++i) {
      packed[i].load(codes + i * kExpertWarpgroups * kUnit, scales + i * kExpertWarpgroups * kUnit);
    }
  }

  __device__ __forceinline__ void release(int index) const {
    if (lane == 0) ptx::mbarrier_arrive(empty_barrier(index));
  }

  template <int kHalf>
  __device__ __forceinline__ static void dequantise(const Packed& packed,
                                                    const ScaleFragment<kFormat>& scale,
                                                    uint32_t (&a)[4][4]) {
    dequantise_block<kFormat, 2 * kHalf>(packed, scale, a[0], a[1]);
    dequantise_block<kFormat, 2 * kHalf + 1>(packed, scale, a[2], a[3]);
  }

  // acc += unit x tokens, in two groups of wgmma: one is in flight while the next is expanded.
  // `tokens`: descriptor; `k64_step`: from one 128-byte column of the token tile to the next.
  // `released`: ring index of the stage before, whose last group has ended after the first group here;
  // or -1.
  __device__ __forceinline__ void multiply(Accumulators& acc, const Packed (&packed)[ptx::kRowTiles],
                                           uint32_t tokens, uint32_t k64_step, uint32_t variant,
                                           bool both, int released) const {
    // Two sets: the first is read by wgmma while the second is written.
    uint32_t a[ptx::kRowTiles][4][4], b[ptx::kRowTiles][4][4];
    const ScaleFragment<kFormat> first(packed[0]);
    const ScaleFragment<kFormat> second(packed[1]);
    dequantise<0>(packed[0], first, a[0]);
    if (both) dequantise<0>(packed[1], second, a[1]);
    ptx::wgmma_k64(acc, a, tokens, variant);
    ptx::wgmma_wait<1>();
    if (released >= 0) release(released);
    dequantise<1>(packed[0], first, b[0]);
    if (both) dequantise<1>(packed[1], second, b[1]);
    ptx::wgmma_k64(acc, b, tokens + k64_step, variant);
    ptx::wgmma_wait<1>();
  }

  __device__ __forceinline__ uint32_t token_descriptor() const {
    const uint32_t address = token_stage(params, stage.index);
    return __shfl_sync(0xffffffffu, address >> 4, 0) | ptx::kDescriptorLow;
  }

  // `row_tiles`: 1 or 2 of this warpgroup.
  __device__ __forceinline__ void run_tile(const TileSlot& tile, int row_tiles, Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < ptx::kAccumulators; ++i) acc[0][i] = acc[1][i] = 0.0f;
    const uint32_t variant = __shfl_sync(0xffffffffu, ptx::wgmma_variant(tile.width, row_tiles), 0);
    const uint32_t k64_step = __shfl_sync(0xffffffffu, tile.width * 8, 0);
    const bool both = __shfl_sync(0xffffffffu, row_tiles, 0) == 2;
    Packed first[ptx::kRowTiles], second[ptx::kRowTiles];
    int previous = -1;
    int left = tile.num_stages;
    wait_stage();
    mark_first_tile();
    load(first, 0);
#pragma unroll 1
    do {
      const uint32_t tokens = token_descriptor();
      const int current = stage.index;
      load(second, 1);
      multiply(acc, first, tokens, k64_step, variant, both, previous);
      stage.advance(params.num_stages);
      if (--left > 0) {
        wait_stage();
        load(first, 0);
      }
      multiply(acc, second, tokens + 2 * k64_step, k64_step, variant, both, -1);
      previous = current;
    } while (left > 0);
    ptx::wgmma_wait<0>();
    release(previous);
    store(tile, acc[0], tile.tile.first_row_tile + group);
    if (both) store(tile, acc[1], tile.tile.first_row_tile + group + kExpertWarpgroups);
  }

  __device__ __forceinline__ void store(const TileSlot& tile, const float (&acc)[ptx::kAccumulators],
                                        int row_tile) const {
    if (tile.tile.phase == Phase::kFc1) {
      store_intermediate(params, tile, acc, row_tile, warp, ptx::lane_id());
    } else {
      store_output(params, tile, acc, row_tile, warp, ptx::lane_id());
    }
  }

  __device__ __forceinline__ void mark_first_tile() const {
    if constexpr (kRecordTiming) {
      uint64_t* mark = params.timing ? params.timing + blockIdx.x * kTimingMarks + kMarkFirstTile : nullptr;
      if (threadIdx.x == 0 && mark && *mark == 0) *mark = ptx::globaltimer_ns();
    }
  }

  // A tile that is too low for this warpgroup leaves it idle.
  __device__ __forceinline__ void skip_tile(const TileSlot& tile) {
    for (int i = 0; i < tile.num_stages; ++i) {
      wait_stage();
      release(stage.index);
      stage.advance(params.num_stages);
    }
  }

  __device__ __forceinline__ void run() {
    Accumulators acc = {};
    for (;;) {
      waiter.wait(tile_full_barrier(slot.index), slot.phase);
      const TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) break;
      const int row_tiles = (tile.tile.num_row_tiles - group + 1) / kExpertWarpgroups;
      if (row_tiles > 0) {
        run_tile(tile, row_tiles, acc);
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
