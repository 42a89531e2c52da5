#pragma once

#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/ptx/copy.cuh"
#include "kernels/cuda/ptx/warp.cuh"

// One rank: the first token stages of a CTA's first tile are brought by the multiplying warps,
// which would wait for them: all rows at once, and by a few instructions. The way through the token
// warps' code takes two microseconds more when it is run for the first time.
namespace expertd::cuda::moe_layer {

// How many: what the ring holds, whole ones only, and so that each token warp has one left, behind
// which it leaves what those who store results need.
__device__ __forceinline__ int first_token_stages(const MoeLayerParams& params,
                                                  const TileSlot& tile) {
  if (params.peers.num_ranks > 1 || tile.rows <= 0 || tile.tile.phase != Phase::kFc1) return 0;
  const int whole = min(params.hidden / kStageK, num_stages_of(tile) - kTokenWarps);
  return max(min(whole, params.num_stages), 0);
}

// A warp takes every kExpertWarps-th row. The ring has to be free, and the list of routes known.
__device__ __forceinline__ void ask_first_tokens(const MoeLayerParams& params, int warp, int lane) {
  const TileSlot& tile = shared_state().tiles[0];
  const int stages = first_token_stages(params, tile);
  if (stages == 0) return;
  const bool near = list_is_near(params);
#pragma unroll 1
  for (int row = warp; row < tile.rows; row += kExpertWarps) {
    const uint32_t position = tile.first_route + row;
    const uint32_t route = sorted_route(params, near, position);
    const int64_t first = int64_t{params.by_top_k.Quotient(route)} * params.hidden;
    const uint16_t* from = params.x + first + lane * 8;
    uint32_t to = token_stage_address(params, 0) + (lane >> 3) * (tile.width * 128) + row * 128 +
                  (((lane & 7) ^ (row & 7)) << 4);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      ptx::cp_async_16(to, from);
      to += params.token_stride;
      from += kStageK;
    }
  }
  ptx::cp_async_commit();
}

// All of them have landed, and wgmma sees them.
__device__ __forceinline__ void wait_for_first_tokens(const MoeLayerParams& params) {
  if (first_token_stages(params, shared_state().tiles[0]) == 0) return;
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync_aligned<kFirstTokensBarrier>(kExpertWarps * 32);
}

}  // namespace expertd::cuda::moe_layer
