#pragma once

#include "kernels/cuda/moe_layer/dequantise.cuh"
#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

// Four warpgroups multiply: warpgroup w takes the w-th 64-row tile of each claimed tile (none if the tile
// is lower). Weights go from the ring to registers, are expanded there and are wgmma's A operand; tokens
// are its B operand in the ring. K is summed in one order whatever the tile, so a row's bits do not depend
// on its neighbours. Results are announced one stage late, when the stores have drained, or at once if
// the warp would have to wait: what it waits for may depend on them.
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
  uint32_t* unannounced = nullptr;  // flag of a finished tile
  bool is_old = false;              // a stage has passed since

  __device__ __forceinline__ void announce() {
    __threadfence();
    __syncwarp();
    if (lane == 0 && atomicAdd(&shared_state().published[group], 1u) % 4 == 3) {
      __threadfence();
      ptx::st_relaxed_gpu(unannounced, params.step);
    }
    unannounced = nullptr;
  }

  // Before a wait for `barrier`.
  __device__ __forceinline__ void before_wait(uint32_t barrier, uint32_t parity) {
    if (unannounced == nullptr) return;
    if (is_old || !__all_sync(0xffffffffu, ptx::mbarrier_test_wait(barrier, parity))) {
      announce();
    } else {
      is_old = true;
    }
  }

  __device__ __forceinline__ void wait_stage() {
    const uint32_t full = full_barrier(stage.index);
    before_wait(full, stage.phase);
    waiter.wait(full, stage.phase);
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

  // acc (+)= unit x tokens, in two groups of wgmma: one is in flight while the next is expanded.
  // `released`: ring index of the stage before, whose last group has ended after the first group here;
  // or -1 in a tile's first unit, which starts the sums.
  __device__ __forceinline__ void multiply(float (&acc)[ptx::kAccumulators], const Packed& packed,
                                           uint64_t tokens, uint32_t n_index, bool is_first,
                                           int released) const {
    const ScaleFragment<kFormat> scale(packed);
    uint32_t a[4][4];
    dequantise_block<kFormat, 0>(packed, scale, a[0], a[1]);
    dequantise_block<kFormat, 1>(packed, scale, a[2], a[3]);
    ptx::wgmma_k64(acc, a, tokens, n_index, is_first ? 0u : 1u);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (released >= 0) release(released);
    dequantise_block<kFormat, 2>(packed, scale, a[0], a[1]);
    dequantise_block<kFormat, 3>(packed, scale, a[2], a[3]);
    ptx::wgmma_k64(acc, a, tokens + k64_step(n_index), n_index, 1u);
    ptx::wgmma_commit();
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
    const uint32_t n_index = __shfl_sync(0xffffffffu, tile.width / 8 - 1, 0);
    Packed first, second;
    int previous = -1;
    int left = tile.num_stages;
    wait_stage();
    load(first, 0);
#pragma unroll 1
    do {
      const uint64_t tokens = token_descriptor();
      const int current = stage.index;
      load(second, 1);
      multiply(acc, first, tokens, n_index, previous < 0, previous);
      stage.advance(params.num_stages);
      if (--left > 0) {
        wait_stage();
        load(first, 0);
      }
      multiply(acc, second, tokens + 2 * k64_step(n_index), n_index, false, -1);
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
    remember(tile, row_tile);
  }

  __device__ __forceinline__ void remember(const TileSlot& tile, int row_tile) {
    const bool is_fc1 = tile.tile.phase == Phase::kFc1;
    unannounced = is_fc1 ? params.local.fc1_done + tile.tile.token_tile * params.local.fc1_done_stride
                         : params.local.fc2_done + tile.tile.token_tile * params.local.fc2_done_stride;
    unannounced += row_tile;
    is_old = false;
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
      const uint32_t tile_full = tile_full_barrier(slot.index);
      before_wait(tile_full, slot.phase);
      waiter.wait(tile_full, slot.phase);
      const TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) break;
      if (group < tile.tile.num_row_tiles) {
        run_tile(tile, acc);
      } else {
        skip_tile(tile);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_empty_barrier(slot.index));
      slot.advance(kTileSlots);
    }
    if (unannounced != nullptr) announce();
  }
};

}  // namespace expertd::cuda::moe_layer
