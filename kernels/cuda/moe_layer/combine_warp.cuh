#pragma once

#include "kernels/cuda/moe_layer/partial_row.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// What the ways to combine have in common.
namespace expertd::cuda::moe_layer {

struct CombineWarp {
  const MoeLayerParams& params;
  Waiter waiter;
  int warp;
  int lane;
  PartialRow row;

  __device__ __forceinline__ CombineWarp(const MoeLayerParams& p, int w, int l)
      : params(p), waiter{p}, warp(w), lane(l), row(p, l) {}

  __device__ __forceinline__ void store(const float (&values)[8], int64_t element) const {
    if (params.output_f32) {
      float4* to = reinterpret_cast<float4*>(static_cast<float*>(params.output) + element);
      to[0] = make_float4(values[0], values[1], values[2], values[3]);
      to[1] = make_float4(values[4], values[5], values[6], values[7]);
    } else {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.output) + element) =
          PartialRow::pack(values);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
