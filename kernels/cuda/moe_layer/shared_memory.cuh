#pragma once

#include <cstdint>

#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/moe_layer/scheduler.h"
#include "kernels/cuda/moe_layer/traits.h"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/memory.cuh"
#include "kernels/cuda/ptx/warp.cuh"

// Shared memory of a CTA:
//   [SharedState, padded to kStateBytes]
//   one ring (HasOneRing):  [num_stages x (weight stage, token_tile rows)]
//   two:  [weights: num_stages x weight stage][tokens: num_stages x token_tile rows]
//   [route_begin, slots + 1][tile_begin, slots + 1][list of routes, if it is near]
// While routes are sorted the rings hold the first stage of weights and the counts of routes. Every
// address is a constant or comes from the parameters: roles keep no pointers in registers.
namespace expertd::cuda::moe_layer {

// A claimed tile on its way from the claiming warp to the others. `rows` < 0 ends the list.
struct TileSlot {
  Tile tile;
  int32_t width;         // rows of the token tile rounded up to 8: N of the multiplication
  int32_t rows;          // valid rows
  int32_t num_units;     // of K, 128 each
  uint32_t first_route;  // position of the first row in the sorted routes; of the list's end: this
                         // CTA's place in the order in which CTAs come to it
  // Written before the last token stage of the warp that leaves them is announced:
  float factors[layout::kGroupTiles][2];  // of the accumulators, by 64-row tile and half
  uint32_t route[kMaxTokenTile];          // by row
};

// The ranks' tokens of a step. A route has one number on this rank: those of rank 0's tokens come
// first, then those of rank 1's, ..., each t * K + k.
struct Sources {
  uint32_t first_route[layout::kMaxKernelRanks + 1];
  int32_t num_tokens[layout::kMaxKernelRanks];
  int16_t top_k[layout::kMaxKernelRanks];
};

// Tokens of the CTA whose rows are to go out: see send_order.cuh.
struct SendWindow {
  uint32_t keys[kSendWindow];
  uint32_t owners[kSendWindow];  // a bit a rank
};

// How far the announcing warp is with the partial rows that it returns: see role_return.cuh, and
// ItemWalk in cta_share.cuh.
struct ReturnState {
  int32_t block;
  int32_t distance;
  int32_t offset;
  int32_t complete;      // column blocks that are complete
  int32_t found;         // flags of the next one that have been seen, in fours
  uint32_t first_route;  // of the next item's token, if it is known
  int32_t known;
  uint32_t slot[32];  // of its routes
  float weight[32];
};

struct SharedState {
  uint64_t full[kMaxStages];        // weights loaded, 1 arrival and the bytes; one ring: tokens too
  uint64_t empty[kMaxStages];       // weights in registers: kExpertWarps arrivals
  uint64_t token_full[kMaxStages];  // tokens loaded: kTokenWarps arrivals, and the bytes for FC2
  uint64_t token_empty[kMaxStages];  // tokens multiplied: kExpertWarps arrivals
  uint64_t tile_full[kTileSlots];    // tile posted: 1 arrival
  uint64_t tile_done[kTileSlots];    // results stored: kExpertWarps arrivals
  uint64_t tile_empty[kTileSlots];   // slot free: kTokenWarps arrivals + 1 of the announcing warp
  uint64_t tokens_asked;             // the first tile's first tokens have been asked for: 1 arrival
  uint64_t unwatched;                // who has nothing to release arrives here; nobody waits
  uint32_t gave_up;                  // FaultCode of the CTA's first failed wait
  uint32_t rows_here;  // up to which of the sorted routes rows have been seen: row_watcher.cuh
  Sources sources;
  int64_t list_begin;  // of the step's list of routes, among layout::ListEntries
  Schedule schedule;
  union {  // rows are sent before partial rows are returned
    SendWindow send;
    ReturnState returned;
  };
  alignas(16) MoeLayerParams params;
  TileSlot tiles[kTileSlots];
};
static_assert(sizeof(SharedState) <= kStateBytes, "the ring starts behind the state");

__device__ __forceinline__ SharedState& shared_state() {
  return *reinterpret_cast<SharedState*>(ptx::dynamic_shared_memory());
}

// The launch's parameters for functions that are not inlined. Those reach the launch's own through
// the global memory behind the constant bank only: a miss for every 32 bytes of them, again behind
// every fence.
__device__ __forceinline__ const MoeLayerParams& near_params() { return shared_state().params; }
// By kCount threads that meet afterwards. Who does not meet them makes the same copy.
template <int kCount>
__device__ __forceinline__ void copy_params(const MoeLayerParams& params, int thread) {
  constexpr int kWords = sizeof(MoeLayerParams) / 4;
  const auto* from = reinterpret_cast<const uint32_t*>(&params);
  auto* to = reinterpret_cast<uint32_t*>(&shared_state().params);
  uint32_t words[(kWords + kCount - 1) / kCount];
#pragma unroll
  for (int i = 0; i * kCount < kWords; ++i) {
    if (thread + i * kCount < kWords) words[i] = from[thread + i * kCount];
  }
#pragma unroll
  for (int i = 0; i * kCount < kWords; ++i) {
    if (thread + i * kCount < kWords) to[thread + i * kCount] = words[i];
  }
}

// By all warps that route. Not aligned: routing is called from two places.
__device__ __forceinline__ void sync_routing() {
  ptx::barrier_sync<kRoutingBarrier>(kRoutingThreads);
}

// Barriers by ring index.
inline constexpr uint32_t kNoBarrier = 0xffffffffu;
__device__ __forceinline__ uint32_t full_barrier(int stage) {
  return ptx::shared_address(shared_state().full) + stage * 8;
}
__device__ __forceinline__ uint32_t empty_barrier(int stage) {
  return ptx::shared_address(shared_state().empty) + stage * 8;
}
__device__ __forceinline__ uint32_t token_full_barrier(int place) {
  return ptx::shared_address(shared_state().token_full) + place * 8;
}
__device__ __forceinline__ uint32_t token_empty_barrier(int place) {
  return ptx::shared_address(shared_state().token_empty) + place * 8;
}
__device__ __forceinline__ uint32_t tokens_asked_barrier() {
  return ptx::shared_address(&shared_state().tokens_asked);
}
__device__ __forceinline__ uint32_t unwatched_barrier() {
  return ptx::shared_address(&shared_state().unwatched);
}
__device__ __forceinline__ uint32_t tile_full_barrier(int slot) {
  return ptx::shared_address(shared_state().tile_full) + slot * 8;
}
__device__ __forceinline__ uint32_t tile_done_barrier(int slot) {
  return ptx::shared_address(shared_state().tile_done) + slot * 8;
}
__device__ __forceinline__ uint32_t tile_empty_barrier(int slot) {
  return ptx::shared_address(shared_state().tile_empty) + slot * 8;
}

// Ring memory, as shared addresses. Weights: [unit of K][64-row tile] packed units. Tokens: [64 of
// K][row] of 128 bytes, swizzled. Both start on 1024 bytes. kTokens: the variant's.
template <layout::WeightFormat kFormat, int kTokens>
__device__ __forceinline__ uint32_t weight_stage_address(int stage) {
  return ptx::shared_address(ptx::dynamic_shared_memory()) + kStateBytes +
         stage * WeightStride(kFormat, kTokens);
}
__device__ __forceinline__ uint32_t token_stage_address(const MoeLayerParams& params, int stage) {
  return ptx::shared_address(ptx::dynamic_shared_memory()) + params.tokens_offset +
         stage * params.token_stride;
}
__device__ __forceinline__ int num_stages_of(const TileSlot& tile) {
  return (tile.num_units + kStageUnits - 1) / kStageUnits;
}

// The rank whose token a route is of; `from` is not above it.
__device__ __forceinline__ int source_of(const MoeLayerParams& params, uint32_t route,
                                         int from = 0) {
  int source = from;
  while (source + 1 < params.peers.num_ranks &&
         route >= shared_state().sources.first_route[source + 1]) {
    ++source;
  }
  return source;
}

// [slots + 1] each: first route and first token tile of a slot.
__device__ __forceinline__ uint32_t* route_begin(const MoeLayerParams& params) {
  return reinterpret_cast<uint32_t*>(ptx::dynamic_shared_memory() + params.tables_offset);
}
__device__ __forceinline__ uint32_t* tile_begin(const MoeLayerParams& params) {
  return route_begin(params) + params.num_slots + 1;
}

// The step's routes by slot: near, in shared memory, if the CTA sorted them itself and has room for
// them; else in the workspace, the CTA's own list or the one that the rank's CTAs share.
__device__ __forceinline__ bool list_is_near(const MoeLayerParams& params) {
  const uint32_t routes = shared_state().sources.first_route[params.peers.num_ranks];
  return static_cast<int32_t>(routes) <= params.near_routes;
}
__device__ __forceinline__ uint16_t* near_list(const MoeLayerParams& params) {
  return reinterpret_cast<uint16_t*>(ptx::dynamic_shared_memory() + params.list_offset);
}
__device__ __forceinline__ uint32_t* far_list(const MoeLayerParams& params) {
  return params.local.routes + shared_state().list_begin;
}
__device__ __forceinline__ uint32_t sorted_route(const MoeLayerParams& params, bool near,
                                                 uint32_t position) {
  return near ? near_list(params)[position] : far_list(params)[position];
}
// In the workspace: by route the global slot that computes it, or kNowhere.
__device__ __forceinline__ uint16_t* route_slots(const MoeLayerParams& params) {
  return params.local.route_slots + shared_state().list_begin;
}

// Index in a ring and the parity of its current round.
struct PipelineState {
  int index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance(int size) {
    const bool wraps = index + 1 == size;
    index = wraps ? 0 : index + 1;
    phase ^= wraps ? 1u : 0u;
  }
};

}  // namespace expertd::cuda::moe_layer
