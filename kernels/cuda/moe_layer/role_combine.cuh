#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// The weighted sum of each token's expert outputs, by the warps that multiplied, after the tile list: a
// warp takes 256 columns of a token, waits until each of its routes is there, and adds in route order in
// f32. The split over warps is fixed, so the bits are too.
namespace expertd::cuda::moe_layer {

struct CombineRole {
  static constexpr int kColumns = 256;  // a lane has 8
  static constexpr int kRowsAtOnce = 8;

  const MoeLayerParams& params;
  Waiter waiter;
  int lane;

  // Lane k looks at route k of the token.
  __device__ __forceinline__ uint32_t wait_for_routes(int token, int slice) const {
    const int64_t route = int64_t{token} * params.top_k + lane;
    uint32_t token_tile = layout::kNoTile;
    if (lane < params.top_k) {
      token_tile = params.local.tile_of_route[route];
    }
    const int row_tiles = min(4, params.hidden / 64 - slice * 4);
    const uint32_t* done = params.local.fc2_done +
                           int64_t{token_tile} * params.local.fc2_done_stride + slice * 4;
    waiter.wait_for_step(kWaitFc2, token, [&] {
      if (token_tile == layout::kNoTile) return params.step;
      const uint4 flags = ptx::ld_relaxed_gpu_v4(done);
      const uint32_t words[4] = {flags.x, flags.y, flags.z, flags.w};
      uint32_t found = params.step;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < row_tiles && words[i] != params.step) found = words[i];
      }
      return found;
    });
    return __ballot_sync(0xffffffffu, token_tile != layout::kNoTile);
  }

  __device__ __forceinline__ static void add(float (&sum)[8], const uint4& row, float weight) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += weight * __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
    }
  }

  __device__ __forceinline__ void combine(int token, int slice) const {
    const uint32_t present = wait_for_routes(token, slice);
    const int column = slice * kColumns + lane * 8;
    if (column >= params.hidden) return;
    const int64_t route = int64_t{token} * params.top_k;
    const uint16_t* y = params.local.y + route * params.hidden + column;
    float sum[8] = {};
    for (int base = 0; base < params.top_k; base += kRowsAtOnce) {
      uint4 rows[kRowsAtOnce];
      float weights[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (base + i < params.top_k && (present >> (base + i) & 1u)) {
          rows[i] = __ldcg(reinterpret_cast<const uint4*>(y + int64_t{base + i} * params.hidden));
          weights[i] = params.weights[route + base + i];
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (base + i < params.top_k && (present >> (base + i) & 1u)) add(sum, rows[i], weights[i]);
      }
    }
    store(sum, int64_t{token} * params.hidden + column);
  }

  __device__ __forceinline__ void store(const float (&sum)[8], int64_t element) const {
    if (params.output_f32) {
      float4* out = reinterpret_cast<float4*>(static_cast<float*>(params.output) + element);
      out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.output) + element) =
          make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                     pack_bf16(sum[6], sum[7]));
    }
  }

  // Items (token, slice) in token order over all multiplying warps of the grid.
  __device__ __forceinline__ void run(int warp) const {
    const int slices = (params.hidden + kColumns - 1) / kColumns;
    const int items = params.num_tokens * slices;
    const int stride = gridDim.x * kExpertWarps;
    for (int item = blockIdx.x + warp * gridDim.x; item < items; item += stride) {
      combine(item / slices, item % slices);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
