#pragma once

#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/moe_layer/shared_memory.cuh"

// Routing, by all warps of every CTA for itself: a stable counting sort of the step's routes by
// expert slot. Every CTA finds the same order, so no CTA waits for another. The sorted list goes to
// the CTA's copy in the workspace; the tables of a slot's first route and first token tile stay in
// shared memory.
namespace expertd::cuda::moe_layer {

struct RouteSorter {
  static constexpr int kReplicated = -2;

  const MoeLayerParams& params;
  // In the ring's memory:
  uint32_t* counts;  // [kWarps][num_slots]
  int16_t* table;    // [E] local slot, -1 elsewhere, or kReplicated
  int16_t* cache;    // local slot by route, for the first `cached` of them
  int cached;

  __device__ __forceinline__ explicit RouteSorter(const MoeLayerParams& p) : params(p) {
    counts = reinterpret_cast<uint32_t*>(shared_memory + kStateBytes);
    table = reinterpret_cast<int16_t*>(counts + kWarps * p.num_slots);
    cache = table + p.num_experts;
    const int left =
        static_cast<int>(shared_memory + p.tables_offset - reinterpret_cast<uint8_t*>(cache));
    cached = left / static_cast<int>(sizeof(int16_t));
  }

  __device__ __forceinline__ int local_slot(int global_slot) const {
    const int local = global_slot - params.peers.rank * params.slots_per_rank;
    return local >= 0 && local < params.num_slots ? local : -1;
  }

  __device__ __forceinline__ void fill_table(int thread) const {
    for (int expert = thread; expert < params.num_experts; expert += kThreads) {
      const int first = params.first_slot[expert];
      const int count = params.first_slot[expert + 1] - first;
      const int slot = local_slot(params.slots[first]);
      table[expert] = static_cast<int16_t>(count == 1 ? slot : kReplicated);
    }
  }

  // Local slot of a route, or -1.
  __device__ __forceinline__ int slot_of(int route, int expert) const {
    if (expert < 0) return -1;
    const int slot = table[expert];
    if (slot != kReplicated) return slot;
    const int token = route / params.top_k;
    const int row = params.row_in_request ? params.row_in_request[token] : token;
    const int first = params.first_slot[expert];
    return local_slot(params.slots[first + row % (params.first_slot[expert + 1] - first)]);
  }

  __device__ __forceinline__ int chunk_begin(int warp) const {
    const int routes = params.num_tokens * params.top_k;
    const int chunk = (routes + kWarps * 32 - 1) / (kWarps * 32) * 32;
    return min(warp * chunk, routes);
  }

  // Looks routes up in parallel, as many as there is room for. `expert`: of route `thread`, loaded
  // while the table was.
  __device__ __forceinline__ void fill_cache(int thread, int expert) const {
    const int routes = min(params.num_tokens * params.top_k, cached);
    if (thread < routes) cache[thread] = static_cast<int16_t>(slot_of(thread, expert));
#pragma unroll 4
    for (int route = thread + kThreads; route < routes; route += kThreads) {
      cache[route] = static_cast<int16_t>(slot_of(route, params.ids[route]));
    }
  }

  __device__ __forceinline__ int cached_slot(int route) const {
    return route < cached ? cache[route] : slot_of(route, params.ids[route]);
  }

  // Counts of each warp's run of routes.
  __device__ __forceinline__ void count(int warp, int lane) const {
    uint32_t* mine = counts + warp * params.num_slots;
    for (int i = lane; i < params.num_slots; i += 32) mine[i] = 0;
    __syncwarp();
    const int end = chunk_begin(warp + 1);
    for (int base = chunk_begin(warp); base < end; base += 32) {
      const int route = base + lane;
      const int slot = route < end ? cached_slot(route) : -1;
      const uint32_t same = __match_any_sync(0xffffffffu, slot);
      if (slot >= 0 && lane == __ffs(same) - 1) mine[slot] += __popc(same);
      __syncwarp();
    }
  }

  // Counts become each warp's position inside the slot; the slot's total goes to route_begin[slot +
  // 1].
  __device__ __forceinline__ void rank_warps(int thread) const {
    for (int slot = thread; slot < params.num_slots; slot += kThreads) {
      uint32_t sum = 0;
      for (int warp = 0; warp < kWarps; ++warp) {
        uint32_t& count = counts[warp * params.num_slots + slot];
        const uint32_t value = count;
        count = sum;
        sum += value;
      }
      route_begin(params)[slot + 1] = sum;
    }
  }

  // One warp: totals become the tables, and the tables the schedule.
  __device__ __forceinline__ void make_tables(int lane) const {
    uint32_t routes = 0, tiles = 0;
    for (int base = 0; base < params.num_slots; base += 32) {
      const int slot = base + lane;
      uint32_t r = slot < params.num_slots ? route_begin(params)[slot + 1] : 0;
      uint32_t t = NumTokenTiles(static_cast<int>(r), params.token_tile);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t r_before = __shfl_up_sync(0xffffffffu, r, step);
        const uint32_t t_before = __shfl_up_sync(0xffffffffu, t, step);
        if (lane >= step) {
          r += r_before;
          t += t_before;
        }
      }
      if (slot < params.num_slots) {
        route_begin(params)[slot + 1] = routes + r;
        tile_begin(params)[slot + 1] = tiles + t;
      }
      routes += __shfl_sync(0xffffffffu, r, 31);
      tiles += __shfl_sync(0xffffffffu, t, 31);
    }
    if (lane == 0) {
      route_begin(params)[0] = 0;
      tile_begin(params)[0] = 0;
    }
    __syncwarp();
    if (lane == 0) {
      shared_state().schedule =
          MakeSchedule(tile_begin(params), params.num_slots, params.intermediate / 32,
                       params.hidden / 64, static_cast<int>(gridDim.x));
    }
  }

  // Writes each route's place.
  __device__ __forceinline__ void place(int warp, int lane) const {
    uint32_t* mine = counts + warp * params.num_slots;
    const int end = chunk_begin(warp + 1);
    for (int base = chunk_begin(warp); base < end; base += 32) {
      const int route = base + lane;
      const int slot = route < end ? cached_slot(route) : -1;
      const uint32_t same = __match_any_sync(0xffffffffu, slot);
      if (slot >= 0) {
        const uint32_t first = route_begin(params)[slot];
        const uint32_t in_slot = mine[slot] + __popc(same & ((1u << lane) - 1u));
        sorted_routes(params)[first + in_slot] = static_cast<uint32_t>(route);
      }
      if (route < end) present_routes(params)[route] = slot >= 0;
      __syncwarp();
      if (slot >= 0 && lane == __ffs(same) - 1) mine[slot] += __popc(same);
      __syncwarp();
    }
  }

  // All threads of the CTA; ends with a barrier.
  __device__ __forceinline__ void sort(int warp, int lane) const {
    const int thread = warp * 32 + lane;
    const int expert = thread < params.num_tokens * params.top_k ? params.ids[thread] : -1;
    fill_table(thread);
    __syncthreads();
    fill_cache(thread, expert);
    __syncthreads();
    count(warp, lane);
    __syncthreads();
    rank_warps(warp * 32 + lane);
    __syncthreads();
    if (warp == 0) make_tables(lane);
    __syncthreads();
    place(warp, lane);
    __syncthreads();
  }
};

// Not inlined: inside the kernel its branches cost the compiler the proof that the multiplying
// loop's values are the same in a whole warp.
static __device__ __noinline__ void sort_routes(const MoeLayerParams& params, int warp, int lane) {
  RouteSorter(params).sort(warp, lane);
}

}  // namespace expertd::cuda::moe_layer
