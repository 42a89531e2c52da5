#pragma once

#include "kernels/cuda/moe_layer/role_dispatch.cuh"
#include "kernels/cuda/moe_layer/route_sources.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/shared_sort.cuh"
#include "kernels/cuda/moe_layer/slot_tables.cuh"

// Routing, by all warps but the announcing one: a stable counting sort of the step's routes, those
// of all ranks' tokens, by expert slot of this rank. Own sort, up to kOwnSortRoutes: every CTA
// sorts all of them into a list of its own in the workspace; every CTA finds the same order, so no
// CTA waits for another. Shared sort, of more routes: each CTA sorts a part, and the CTAs meet
// (shared_sort.cuh); the list that they share holds the same. With several ranks a CTA waits for
// the peers' routes before. The tables of a slot's first route and first token tile stay in shared
// memory.
namespace expertd::cuda::moe_layer {

static __device__ __noinline__ void exchange_routes(int warp, int lane);
static __device__ __noinline__ void sort_together(int warp, int lane);

struct RouteSorter : RouteSources {
  using RouteSources::RouteSources;

  // A part is a multiple of a warp's width; the last CTAs may have none.
  __device__ __forceinline__ Part part_of_cta() const {
    const int routes = num_routes();
    const int width = static_cast<int>(gridDim.x) * 32;
    const int length = (routes + width - 1) / width * 32;
    const int begin = min(static_cast<int>(blockIdx.x) * length, routes);
    return {begin, min(begin + length, routes)};
  }

  __device__ __forceinline__ int chunk_begin(const Part& part, int warp) const {
    const int routes = part.end - part.begin;
    const int chunk = (routes + kRoutingThreads - 1) / kRoutingThreads * 32;
    return part.begin + min(warp * chunk, routes);
  }

  // Counts of each warp's run of routes, and each route's slot.
  template <bool kAllCached>
  __device__ __forceinline__ void count(const Part& part, int warp, int lane) const {
    uint32_t* mine = counts + warp * params.num_slots;
#pragma unroll 1
    for (int i = lane; i < params.num_slots; i += 32) mine[i] = 0;
    __syncwarp();
    int source = 0;
    const int end = chunk_begin(part, warp + 1);
#pragma unroll 1
    for (int base = chunk_begin(part, warp); base < end; base += 32) {
      const int route = base + lane;
      int slot = -1;
      if (route < end) {
        const uint16_t global_slot = cached_slot<kAllCached>(part, route, source);
        slot = local_slot(global_slot);
        route_slots(params)[route] = global_slot;
      }
      const uint32_t same = __match_any_sync(0xffffffffu, slot);
      if (slot >= 0 && lane == __ffs(same) - 1) mine[slot] += __popc(same);
      __syncwarp();
    }
  }

  // Counts become each warp's position inside the slot; the slot's total goes to route_begin[slot +
  // 1].
  __device__ __forceinline__ void rank_warps(const Part& part, int thread) const {
    constexpr int kAtOnce = 5;
    const int num_slots = params.num_slots;
    // Of fewer routes than threads each warp has at most one run.
    const int used = min((part.end - part.begin + 31) / 32, kRoutingWarps);
    for (int slot = thread; slot < num_slots; slot += kRoutingThreads) {
      uint32_t sum = 0;
#pragma unroll 1
      for (int first = 0; first < used; first += kAtOnce) {
        uint32_t* const some = counts + first * num_slots + slot;
        uint32_t values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) values[i] = first + i < used ? some[i * num_slots] : 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < used) some[i * num_slots] = sum;
          sum += values[i];
        }
      }
      route_begin(params)[slot + 1] = sum;
    }
  }

  // What CTAs before this one have in each slot comes before its own.
  __device__ __forceinline__ void rank_ctas(int warp, int lane) const {
    uint32_t* mine = counts + warp * params.num_slots;
    for (int slot = lane; slot < params.num_slots; slot += 32) {
      mine[slot] += tile_begin(params)[slot + 1];
    }
  }

  // Writes each route's place.
  template <bool kAllCached>
  __device__ __forceinline__ void place(const Part& part, int warp, int lane) const {
    uint32_t* mine = counts + warp * params.num_slots;
    int source = 0;
    const bool near = list_is_near(params);
    const int end = chunk_begin(part, warp + 1);
#pragma unroll 1
    for (int base = chunk_begin(part, warp); base < end; base += 32) {
      const int route = base + lane;
      const int slot = route < end ? local_slot(cached_slot<kAllCached>(part, route, source)) : -1;
      const uint32_t same = __match_any_sync(0xffffffffu, slot);
      if (slot >= 0) {
        const uint32_t first = route_begin(params)[slot];
        const uint32_t in_slot = mine[slot] + __popc(same & ((1u << lane) - 1u));
        if (kAllCached && near) {
          near_list(params)[first + in_slot] = static_cast<uint16_t>(route);
        } else {
          far_list(params)[first + in_slot] = static_cast<uint32_t>(route);
        }
      }
      __syncwarp();
      if (slot >= 0 && lane == __ffs(same) - 1) mine[slot] += __popc(same);
      __syncwarp();
    }
  }

  // All threads that route; a barrier has to follow. In an own sort `tables_known` is called by all
  // of them when the tables are there and the places of the routes are not; then this returns true.
  template <typename TablesKnown>
  __device__ __forceinline__ bool sort(int warp, int lane, TablesKnown tables_known) const {
    const int thread = warp * 32 + lane;
    if (params.peers.num_ranks == 1) {
      look_around(thread);
    } else {
      exchange_routes(warp, lane);
    }
    if (num_routes() > params.own_sort_routes) {
      sort_together(warp, lane);
      return false;
    }
    const Part all = {0, num_routes()};
    if (thread == 0) {
      shared_state().list_begin = params.local.max_routes + blockIdx.x * params.local.own_routes;
    }
    sync_routing();
    count<true>(all, warp, lane);
    sync_routing();
    rank_warps(all, thread);
    sync_routing();
    if (warp == 0) fill_tables(params, lane);
    sync_routing();
    tables_known();
    place<true>(all, warp, lane);
    return true;
  }

  // The rest of a shared sort, when the sources are known.
  __device__ __forceinline__ void sort_part(int warp, int lane) const {
    const SharedSort together{params, Waiter{params}, warp, lane};
    const int thread = warp * 32 + lane;
    Part part = part_of_cta();
    if (thread == 0) shared_state().list_begin = 0;
    fill_cache<1>(part, warp, lane);
    sync_routing();
    count<false>(part, warp, lane);
    sync_routing();
    rank_warps(part, thread);
    if (together.add_up()) {
      rank_ctas(warp, lane);
      sync_routing();
    } else {
      part.end = part.begin;  // the tables will say that there is nothing to do
    }
    if (warp == 0) fill_tables(params, lane);
    sync_routing();
    place<false>(part, warp, lane);
    (void)together.meet(SharedSort::kPlaced);
  }
};

// Apart: code that a launch does not run, but that lies in the way of what it does, costs it time.
static __device__ __noinline__ void exchange_routes(int warp, int lane) {
  RouteSorter(near_params()).exchange(warp, lane);
}
static __device__ __noinline__ void sort_together(int warp, int lane) {
  RouteSorter(near_params()).sort_part(warp, lane);
}

}  // namespace expertd::cuda::moe_layer
