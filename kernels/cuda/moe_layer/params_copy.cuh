#pragma once

#include "kernels/cuda/moe_layer/shared_memory.cuh"

namespace expertd::cuda::moe_layer {

// The parameters, while routes are sorted. Functions that are not inlined reach the launch's own
// through the global memory behind the constant bank only: a miss for every 32 bytes of them.
// They lie behind the rings' other contents, in front of the tables.
inline constexpr int kParamsBytes = (sizeof(MoeLayerParams) + 15) / 16 * 16;
__device__ __forceinline__ MoeLayerParams& routing_params(uint32_t tables_offset) {
  return *reinterpret_cast<MoeLayerParams*>(ptx::dynamic_shared_memory() + tables_offset -
                                            kParamsBytes);
}
// By all threads of the CTA, a word each; a barrier has to follow.
__device__ __forceinline__ const MoeLayerParams& copy_params(const MoeLayerParams& params,
                                                             int thread) {
  constexpr int kWords = sizeof(MoeLayerParams) / 4;
  static_assert(kWords <= kThreads);
  MoeLayerParams& copy = routing_params(params.tables_offset);
  if (thread < kWords) {
    reinterpret_cast<uint32_t*>(&copy)[thread] = reinterpret_cast<const uint32_t*>(&params)[thread];
  }
  return copy;
}

}  // namespace expertd::cuda::moe_layer
