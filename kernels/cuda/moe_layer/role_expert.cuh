#pragma once

#include "kernels/cuda/moe_layer/dequantise.cuh"
#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

// Four warpgroups multiply: warpgroup g takes the g-th 64-row tile of each claimed tile, if there is one.
// Weights go from the ring to registers, are expanded there and are wgmma's A operand; tokens are its B
// operand in the ring. K is summed in one order whatever the tile, so a row's bits do not depend on its
// neighbours.
namespace expertd::cuda::moe_layer {

template <layout::WeightFormat kFormat>
struct ExpertRole {
  static constexpr uint32_t kUnit = layout::UnitBytes(kFormat);
  static constexpr uint32_t kWeightStage = WeightStageBytes(kFormat);
  using Packed = PackedFragment<kFormat>;
  using Accumulators = float[ptx::kAccumulators];

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

  __device__ __forceinline__ void load(Packed& packed, int unit) const {
    const uint32_t base = weight_stage(params, stage.index, kWeightStage) +
                          (unit * layout::kGroupTiles + group) * kUnit;
    packed.load(base + (warp * 32 + lane) * 16,
                base + layout::ScaleWordOffset(kFormat, warp * 16 + lane / 4, 0));
  }

  __device__ __forceinline__ void release(int index) const {
    if (lane == 0) ptx::mbarrier_arrive(empty_barrier(index));
  }

  // acc += K [32 kFirst, 32 (kFirst + 2)) of a unit x tokens: one group of wgmma, in flight while the next
  // is expanded.
  template <int kWidth, int kFirst>
  __device__ __forceinline__ void multiply_half(Accumulators& acc, const Packed& packed,
                                                const ScaleFragment<kFormat>& scale,
                                                uint64_t tokens) const {
    uint32_t a[4][4];
    dequantise_block<kFormat, kFirst>(packed, scale, a[0], a[1]);
    dequantise_block<kFormat, kFirst + 1>(packed, scale, a[2], a[3]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::wgmma<kWidth>(acc, a[step], tokens + step * 2);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }

  // acc += unit x tokens.
  template <int kWidth>
  __device__ __forceinline__ void multiply(Accumulators& acc, const Packed& packed,
                                           uint64_t tokens) const {
    const ScaleFragment<kFormat> scale(packed);
    multiply_half<kWidth, 0>(acc, packed, scale, tokens);
    multiply_half<kWidth, 2>(acc, packed, scale, tokens + kWidth * 8);
  }

  __device__ __forceinline__ uint64_t token_descriptor() const {
    const uint32_t address = token_stage(params, stage.index);
    return ptx::kDescriptor | __shfl_sync(0xffffffffu, address >> 4, 0);
  }

  // One stage: `first` is unit 0, already in registers; leaves the next stage's unit 0 there. No group of
  // wgmma is in flight at the end: where the code of all widths meets, the compiler would keep the A
  // registers of each of them.
  template <int kWidth>
  __device__ __forceinline__ void run_stage(Accumulators& acc, Packed& first, bool is_last) {
    const uint64_t tokens = token_descriptor();
    const int current = stage.index;
    Packed second;
    load(second, 1);
    multiply<kWidth>(acc, first, tokens);
    stage.advance(params.num_stages);
    if (!is_last) {
      wait_stage();
      load(first, 0);
    }
    multiply<kWidth>(acc, second, tokens + 2 * (kWidth * 8));
    ptx::wgmma_wait<0>();
    release(current);
  }

  __device__ __forceinline__ void run_tile(const TileSlot& tile, Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < ptx::kAccumulators; ++i) acc[i] = 0.0f;
    const int n_index = __shfl_sync(0xffffffffu, tile.width / 8 - 1, 0);
    Packed first;
    int left = tile.num_stages;
    wait_stage();
    mark_first_tile();
    load(first, 0);
    // The choice of N is inside the loop so that all N share one set of accumulators.
#pragma unroll 1
    do {
      const bool is_last = --left == 0;
      switch (n_index) {
        case 0: run_stage<8>(acc, first, is_last); break;
        case 1: run_stage<16>(acc, first, is_last); break;
        case 2: run_stage<24>(acc, first, is_last); break;
        case 3: run_stage<32>(acc, first, is_last); break;
        case 4: run_stage<40>(acc, first, is_last); break;
        case 5: run_stage<48>(acc, first, is_last); break;
        case 6: run_stage<56>(acc, first, is_last); break;
        case 7: run_stage<64>(acc, first, is_last); break;
        case 8: run_stage<72>(acc, first, is_last); break;
        default: run_stage<80>(acc, first, is_last); break;
      }
    } while (left > 0);
    const int row_tile = tile.tile.first_row_tile + group;
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
