#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"

namespace expertd::cuda::moe_layer {

// The CTA's tokens in the order in which their rows go out, a window of them at a time: the next is
// the one whose lowest slot on a rank is lowest. Ranks compute slot after slot, and so each slot's
// tokens are complete about when its turn comes.
struct SendOrder {
  static constexpr uint32_t kNobody = 0xffff;  // key of a token without routes
  static constexpr uint32_t kEnd = 0xffffffffu;

  const MoeLayerParams& params;
  int first = 0;  // of the window, among the CTA's tokens

  __device__ __forceinline__ SendWindow& window() const { return shared_state().send; }
  __device__ __forceinline__ int token_at(int index) const {
    return static_cast<int>(blockIdx.x) + (first + index) * static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ bool has(int index) const {
    return index < kSendWindow && token_at(index) < params.num_tokens;
  }

  // By a warp, a route a lane: the slots of the window's tokens. Experts are loaded a turn ahead.
  __device__ __forceinline__ void look_up(int lane) const {
#pragma unroll
    for (int i = 0; i < kSendWindow; i += 32) {
      window().keys[i + lane] = kNobody;
      window().owners[i + lane] = 0;
    }
    __syncwarp();
    int ahead = expert_of(lane);
#pragma unroll 1
    for (int route = lane; has(index_of_route(route)); route += 32) {
      const int expert = ahead;
      ahead = expert_of(route + 32);
      if (expert >= 0) add_route(index_of_route(route), expert);
    }
    __syncwarp();
  }
  // Routes of the window's tokens, one behind the other.
  __device__ __forceinline__ int index_of_route(int route) const {
    return static_cast<int>(params.by_top_k.Quotient(route));
  }
  __device__ __forceinline__ int expert_of(int route) const {
    const int index = index_of_route(route);
    if (!has(index)) return -1;
    return params.ids[(token_at(index) - index) * params.top_k + route];
  }
  __device__ __forceinline__ void add_route(int index, int expert) const {
    const int slot = placed_slot(params, expert, row_in_request(params, token_at(index)));
    const int owner = static_cast<int>(params.by_slots_per_rank.Quotient(slot));
    atomicOr(&window().owners[index], 1u << owner);
    atomicMin(&window().keys[index], static_cast<uint32_t>(slot - owner * params.slots_per_rank));
  }

  // By a warp: what comes behind `place`, or kEnd. Places begin behind 0.
  __device__ __forceinline__ uint32_t next(uint32_t place, int lane) const {
    uint32_t best = kEnd;
#pragma unroll
    for (int i = 0; i < kSendWindow; i += 32) {
      const uint32_t key = window().keys[i + lane];
      const uint32_t here = (key << 8 | (i + lane)) + 1;
      if (key != kNobody && here > place) best = min(best, here);
    }
    return __reduce_min_sync(0xffffffffu, best);
  }
  __device__ __forceinline__ static int index_of(uint32_t place) { return (place - 1) & 0xffu; }
};
static_assert(kSendWindow % 32 == 0 && kSendWindow <= 256 && kMaxSlots < SendOrder::kNobody);

}  // namespace expertd::cuda::moe_layer
