#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// Several ranks: which token rows have come. A token warp that looks for itself begins a tile a
// microsecond later, so the announcing warp looks ahead, in the order of the sorted routes, in
// which tiles need them.
namespace expertd::cuda::moe_layer {

// The flag of the row that a route needs; `what` is told whose.
__device__ __forceinline__ const uint32_t* token_flag(const MoeLayerParams& params, uint32_t route,
                                                      Awaited& what) {
  const Sources& sources = shared_state().sources;
  what.peer = source_of(params, route);
  what.tile = (route - sources.first_route[what.peer]) / sources.top_k[what.peer];
  return token_flags(params, what.peer, params.peers.rank) + what.tile;
}

__device__ __forceinline__ volatile uint32_t& rows_here_word() {
  return *static_cast<volatile uint32_t*>(&shared_state().rows_here);
}
// By a warp: whether the rows of the first `routes` of the sorted routes have been seen. Then they
// are visible to it.
__device__ __forceinline__ bool rows_are_here(uint32_t routes) {
  const bool here = rows_here_word() >= routes;
  ptx::fence_acq_rel_cta();
  return __all_sync(0xffffffffu, here);
}

// By the announcing warp, between looks at what else there is to do.
struct RowWatcher {
  const MoeLayerParams& params;
  int lane;
  uint32_t next = 0;  // of the sorted routes
  uint32_t end;

  __device__ __forceinline__ RowWatcher(const MoeLayerParams& p, int l)
      : params(p), lane(l), end(route_begin(p)[p.num_slots]) {}

  __device__ __forceinline__ bool is_done() const { return next >= end; }

  // One look at the rows of the next 32 routes.
  __device__ __forceinline__ void step() {
    const uint32_t position = next + lane;
    bool here = true;
    if (position < end) {
      Awaited what = {};
      const uint32_t route = sorted_route(params, list_is_near(params), position);
      here = ptx::ld_acquire_sys(token_flag(params, route, what)) == params.step;
    }
    const uint32_t missing = __ballot_sync(0xffffffffu, !here);
    const uint32_t seen = missing == 0 ? 32 : __ffs(missing) - 1;
    if (seen == 0) return;
    next = min(next + seen, end);
    __syncwarp();
    ptx::fence_acq_rel_cta();
    if (lane == 0) rows_here_word() = next;
  }
};

}  // namespace expertd::cuda::moe_layer
