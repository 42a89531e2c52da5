#pragma once

#include "kernels/cuda/moe_layer/shared_memory.cuh"

namespace expertd::cuda::moe_layer {

// The CTA's tokens in the order in which their rows go out, a window of them at a time: the next is
// the one whose lowest slot on a rank is lowest. Ranks compute slot after slot, and so each slot's
// tokens are complete about when its turn comes.
struct SendOrder {
  static constexpr uint16_t kNobody = 0xffff;  // key of a token without routes
  static constexpr uint32_t kEnd = 0xffffffffu;

  const MoeLayerParams& params;
  int first = 0;  // of the window, among the CTA's tokens

  __device__ __forceinline__ SendWindow& window() const { return shared_state().send; }
  __device__ __forceinline__ int token_at(int index) const {
    return static_cast<int>(blockIdx.x) + (first + index) * static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ bool is_empty() const { return token_at(0) >= params.num_tokens; }
  __device__ __forceinline__ int size() const {
    const int grid = static_cast<int>(gridDim.x);
    return min((params.num_tokens - token_at(0) + grid - 1) / grid, kSendWindow);
  }

  // By `count` threads, of which this is `thread`; a barrier has to follow. slot_of(route, expert):
  // global slot or -1.
  template <typename SlotOf>
  __device__ __forceinline__ void look_up(int thread, int count, SlotOf slot_of) const {
    const int tokens = size();
    for (int i = thread; i < tokens; i += count) {
      const int route = token_at(i) * params.top_k;
      uint32_t owners = 0;
      int key = kNobody;
#pragma unroll 4
      for (int k = 0; k < params.top_k; ++k) {
        const int slot = slot_of(route + k, params.ids[route + k]);
        if (slot < 0) continue;
        const int owner = static_cast<int>(params.by_slots_per_rank.Quotient(slot));
        owners |= 1u << owner;
        key = min(key, slot - owner * params.slots_per_rank);
      }
      window().keys[i] = static_cast<uint16_t>(key);
      window().owners[i] = owners;
    }
  }

  // By a warp: what comes behind `place`, or kEnd. Places begin behind 0.
  __device__ __forceinline__ uint32_t next(uint32_t place, int lane) const {
    const int tokens = size();
    uint32_t best = kEnd;
    for (int i = lane; i < tokens; i += 32) {
      const uint32_t key = window().keys[i];
      const uint32_t here = (key << 8 | i) + 1;
      if (key != kNobody && here > place) best = min(best, here);
    }
    return __reduce_min_sync(0xffffffffu, best);
  }
  __device__ __forceinline__ static int index_of(uint32_t place) { return (place - 1) & 0xffu; }
};
static_assert(kSendWindow <= 256 && kMaxSlots < SendOrder::kNobody);

}  // namespace expertd::cuda::moe_layer
