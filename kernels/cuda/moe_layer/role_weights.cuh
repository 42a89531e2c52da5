#pragma once

#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"

// One thread: claims tiles, tells the other warps, and streams the weights of each through the
// ring. It waits for free stages only, never for tokens, so FC2's weights are on their way while
// FC1 still runs.
namespace expertd::cuda::moe_layer {

// Moves the counter to this step, whoever comes first.
__device__ __forceinline__ void open_step(const MoeLayerParams& params) {
  atomicMax(reinterpret_cast<unsigned long long*>(&params.local.head->claim),
            static_cast<unsigned long long>(params.step) << 32);
}

// By lane 0: how many tiles have been claimed before. The first ones of the list are given: CTA c
// starts with tile c. Nothing waits for the answer until it is used; if what is added were known to
// be the same for all lanes, the compiler would gather a warp's threads and wait for it at once.
__device__ __forceinline__ uint64_t claim(const MoeLayerParams& params) {
  return ptx::atom_add_relaxed_gpu(&params.local.head->claim, 1 + ptx::lane_id());
}

// Where a tile's weights lie: `bytes` of each unit of K, `step` apart.
struct WeightSource {
  const uint8_t* first;
  uint32_t step;
  uint32_t bytes;
  int units;
};
template <layout::WeightFormat kFormat>
__device__ __forceinline__ WeightSource weight_source(const MoeLayerParams& params,
                                                      const Tile& tile) {
  constexpr uint32_t kUnit = layout::UnitBytes(kFormat);
  const bool is_fc1 = tile.phase == Phase::kFc1;
  const layout::PackedMatrix matrix = {kFormat, is_fc1 ? 2 * params.intermediate : params.hidden,
                                       is_fc1 ? params.hidden : params.intermediate};
  return {(is_fc1 ? params.fc1_units : params.fc2_units) + tile.slot * matrix.slot_bytes() +
              matrix.unit_offset(tile.first_row_tile, 0),
          matrix.group_width(tile.first_row_tile) * kUnit, tile.num_row_tiles * kUnit,
          matrix.num_units_k()};
}

// Starts the copies of the next stage, two K units or the one that is left, into a free place.
template <layout::WeightFormat kFormat, int kTokens>
__device__ __forceinline__ void stream_stage(WeightSource& source, int place, uint64_t policy) {
  constexpr uint32_t kUnit = layout::UnitBytes(kFormat);
  const uint32_t full = full_barrier(place);
  const uint32_t target = weight_stage_address<kFormat, kTokens>(place);
  const bool both = source.units > 1;
  const uint32_t bytes = source.bytes;
  ptx::mbarrier_arrive_expect_tx(full, both ? 2 * bytes : bytes);
  if (both && bytes == layout::kGroupTiles * kUnit) {
    ptx::bulk_copy(target, source.first, 2 * bytes, full, policy);
  } else {
    ptx::bulk_copy(target, source.first, bytes, full, policy);
    if (both) {
      ptx::bulk_copy(target + layout::kGroupTiles * kUnit, source.first + source.step, bytes, full,
                     policy);
    }
  }
  source.first += kStageUnits * source.step;
  source.units -= kStageUnits;
}

// The CTA's first tile has been posted, perhaps before all routes are placed. The first stage of
// its weights goes to the ring, where nothing else lies, what the ring will hold of the others to
// L2.
template <layout::WeightFormat kFormat, int kTokens>
__device__ __forceinline__ void stream_first_stage(const MoeLayerParams& params) {
  WeightSource source = weight_source<kFormat>(params, shared_state().tiles[0].tile);
  stream_stage<kFormat, kTokens>(source, 0, ptx::policy_evict_first());
  const int units = min(source.units, kStageUnits * (params.num_stages - 1));
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    ptx::bulk_prefetch(source.first + unit * source.step, source.bytes);
  }
}

template <int... kWidths>
__device__ __forceinline__ void describe_tile(const MoeLayerParams& params, const Tile& tile,
                                              TileSlot& out) {
  const uint32_t begin = route_begin(params)[tile.slot];
  const int routes = static_cast<int>(route_begin(params)[tile.slot + 1] - begin);
  const int pitch = TokenTileRows(routes, params.token_tile);
  const int k = tile.phase == Phase::kFc1 ? params.hidden : params.intermediate;
  out.tile = tile;
  out.rows = min(pitch, routes - tile.tile_in_slot * pitch);
  out.width = RoundUp<kWidths...>(out.rows);
  out.num_units = (k + layout::kUnitK - 1) / layout::kUnitK;
  out.first_route = begin + tile.tile_in_slot * pitch;
}

// Tells the other warps of tile `index` of the list, in a free slot, or that the list has ended:
// false. Inlined where one thread is alone: a call there makes ptxas order all multiplications.
template <int... kWidths>
__device__ __forceinline__ bool post_tile(const MoeLayerParams& params, int slot, uint32_t index) {
  const Schedule& schedule = shared_state().schedule;
  TileSlot& out = shared_state().tiles[slot];
  const bool more = index < schedule.num_tiles && !Waiter{params}.gave_up();
  if (more) {
    describe_tile<kWidths...>(params, TileAt(schedule, tile_begin(params), index), out);
  } else {
    out.rows = -1;
    out.first_route = index - schedule.num_tiles;  // a CTA claims one index behind the last tile's
  }
  ptx::mbarrier_arrive(tile_full_barrier(slot));
  return more;
}

template <layout::WeightFormat kFormat, int... kWidths>
struct WeightRole {
  static constexpr int kPostedStages = 2;  // of a tile's, behind the posting of the next tile
  static constexpr int kClaimStages = 3;   // from a claim to when its answer is looked at

  const MoeLayerParams& params;
  Waiter waiter;
  uint64_t policy;
  PipelineState stage;
  PipelineState slot;

  __device__ __forceinline__ explicit WeightRole(const MoeLayerParams& p)
      : params(p), waiter{p}, policy(ptx::policy_evict_first()) {}

  __device__ __forceinline__ void stream(WeightSource& source) {
    waiter.wait(empty_barrier(stage.index), stage.phase ^ 1u);
    stream_stage<kFormat, Largest<kWidths...>()>(source, stage.index, policy);
    stage.advance(params.num_stages);
  }
  // What stream_first_stage() did.
  __device__ __forceinline__ void pass(WeightSource& source) {
    source.first += kStageUnits * source.step;
    source.units -= kStageUnits;
    stage.advance(params.num_stages);
  }

  // The CTA's first tile has been posted. Of its weights only the first stage went before its first
  // tokens: a whole ring of them would keep the tokens two microseconds.
  // The next tile is claimed late, so that at the end of the list no CTA holds one that another
  // could have begun; but the answer takes some two microseconds to come (nothing may look at it
  // before), and the token warps three more to have the tile's first rows here, while the ring
  // lasts five: so it is posted before the last two stages of the tile in hand.
  __device__ __forceinline__ void run() {
    bool more = shared_state().tiles[0].rows > 0;
    bool first = true;
    while (more) {
      WeightSource source = weight_source<kFormat>(params, shared_state().tiles[slot.index].tile);
      slot.advance(kTileSlots);
      if (first) {
        pass(source);
        if (source.units > 0) waiter.wait(tokens_asked_barrier(), 0);
      }
      first = false;
      int left = (source.units + kStageUnits - 1) / kStageUnits;
      for (; left > kClaimStages + kPostedStages; --left) stream(source);
      const uint64_t claimed = claim(params);
      for (; left > kPostedStages; --left) stream(source);
      waiter.wait(tile_empty_barrier(slot.index), slot.phase ^ 1u);
      const bool of_step = claimed >> 32 == params.step;  // or this kernel has been overtaken
      const uint32_t index = gridDim.x + static_cast<uint32_t>(claimed);
      more = post_tile<kWidths...>(params, slot.index, of_step ? index : ~0u);
      for (; left > 0; --left) stream(source);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
