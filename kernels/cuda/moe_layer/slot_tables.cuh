#pragma once

#include "kernels/cuda/moe_layer/scheduler.h"
#include "kernels/cuda/moe_layer/shared_memory.cuh"

// The tables of the slots, and from them the list of tiles: made by one warp from the routes of
// each slot.
namespace expertd::cuda::moe_layer {

__device__ __forceinline__ uint32_t num_token_tiles(const MoeLayerParams& params, uint32_t routes) {
  return params.by_token_tile.Quotient(routes + params.token_tile - 1);
}

// By a warp: the last slot with tile_begin <= value.
__device__ __forceinline__ int find_last_slot(const MoeLayerParams& params, uint32_t value,
                                              int lane) {
  static_assert(kMaxSlots < 32 * 33);
  return internal::FindLastTogether(
      tile_begin(params), params.num_slots + 1, value,
      [&](auto holds) { return __popc(__ballot_sync(0xffffffffu, holds(lane))); });
}

// One warp: totals become the tables, and the tables the schedule. A lane has slots that lie side
// by side.
__device__ __forceinline__ void fill_tables(const MoeLayerParams& params, int lane) {
  uint32_t* const route_table = route_begin(params);
  uint32_t* const tile_table = tile_begin(params);
  const int lane_slots = (params.num_slots + 31) / 32;
  const int begin = lane * lane_slots;
  const int end = min(begin + lane_slots, params.num_slots);
  uint32_t routes = 0, tiles = 0;
#pragma unroll 1
  for (int slot = begin; slot < end; ++slot) {
    const uint32_t count = route_table[slot + 1];
    routes += count;
    tiles += num_token_tiles(params, count);
  }
  const uint32_t own_routes = routes, own_tiles = tiles;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t routes_before = __shfl_up_sync(0xffffffffu, routes, step);
    const uint32_t tiles_before = __shfl_up_sync(0xffffffffu, tiles, step);
    if (lane >= step) {
      routes += routes_before;
      tiles += tiles_before;
    }
  }
  routes -= own_routes;
  tiles -= own_tiles;
#pragma unroll 1
  for (int slot = begin; slot < end; ++slot) {
    const uint32_t count = route_table[slot + 1];
    routes += count;
    tiles += num_token_tiles(params, count);
    route_table[slot + 1] = routes;
    tile_table[slot + 1] = tiles;
  }
  if (lane == 0) {
    route_table[0] = 0;
    tile_table[0] = 0;
  }
  __syncwarp();
  WriteSchedule(
      params.schedule, tile_table,
      [&](uint32_t value) { return find_last_slot(params, value, lane); }, lane == 0,
      &shared_state().schedule);
}

}  // namespace expertd::cuda::moe_layer
