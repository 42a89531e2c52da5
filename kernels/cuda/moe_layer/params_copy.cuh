#pragma once

#include "kernels/cuda/moe_layer/shared_memory.cuh"

namespace expertd::cuda::moe_layer {

// The parameters, nearby. Functions that are not inlined reach the launch's own through the global
// memory behind the constant bank only: a miss for every 32 bytes of them. So while routes are
// sorted there is a copy behind the rings' other contents, in front of the tables. The announcing
// warp, which may still send when the ring takes that place, has one of its own (SendState).
inline constexpr int kParamsBytes = (sizeof(MoeLayerParams) + 15) / 16 * 16;
__device__ __forceinline__ MoeLayerParams& routing_params(uint32_t tables_offset) {
  return *reinterpret_cast<MoeLayerParams*>(ptx::dynamic_shared_memory() + tables_offset -
                                            kParamsBytes);
}
// By kCount threads; they have to meet afterwards.
template <int kCount>
__device__ __forceinline__ void copy_params(const MoeLayerParams& params, MoeLayerParams& copy,
                                            int thread) {
  constexpr int kWords = sizeof(MoeLayerParams) / 4;
  constexpr int kEach = (kWords + kCount - 1) / kCount;
  const auto* from = reinterpret_cast<const uint32_t*>(&params);
  uint32_t words[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (thread + i * kCount < kWords) words[i] = from[thread + i * kCount];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (thread + i * kCount < kWords) {
      reinterpret_cast<uint32_t*>(&copy)[thread + i * kCount] = words[i];
    }
  }
}

}  // namespace expertd::cuda::moe_layer
