#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/ptx/float.cuh"
#include "kernels/cuda/ptx/warp.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

// What happens to a warp's accumulators: 16 weight rows x the tile's tokens; acc[4 j + 2 r + c] is
// row g + 8 r (g = lane / 4), token 8 j + 2 (lane % 4) + c. An 8 x 8 block is transposed between
// the lanes so that each lane stores two neighbouring columns of one token.
namespace expertd::cuda::moe_layer {

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// silu(min(gate, L)) * clamp(up, -L, L); NaN stays NaN. L = infinity for no clamp.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  constexpr float kMinusLog2E = -1.44269504f;
  gate = ptx::min_nan(gate, limit);
  up = ptx::max_nan(ptx::min_nan(up, limit), -limit);
  return gate * ptx::rcp_approx(1.0f + ptx::exp2_approx(gate * kMinusLog2E)) * up;
}

// FC1: row g is gate and row g + 8 up of one column of the intermediate. The rows of a token tile
// lie in h as FC2's stages hold them: [64 columns][row] of 128 bytes, 16-byte chunks swizzled.
template <int kWidth>
__device__ __forceinline__ void store_intermediate(const MoeLayerParams& params,
                                                   const TileSlot& tile,
                                                   const float (&acc)[kWidth / 2], int row_tile,
                                                   int warp_in_group, int lane) {
  const int in_tile = row_tile - tile.tile.first_row_tile;
  const float gate_factor = tile.factors[in_tile][0];
  const float up_factor = tile.factors[in_tile][1];
  const float limit = params.swiglu_limit;
  const int chunk = (row_tile & 1) * 4 + warp_in_group;  // of 8 columns: this warp's
  char* h = reinterpret_cast<char*>(params.local.h) +
            int64_t{tile.first_route} * params.intermediate * 2 + row_tile / 2 * (tile.rows * 128) +
            (lane >> 2) * 128 + ((chunk ^ (lane >> 2)) << 4) + 4 * (lane & 3);
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    const float first = swiglu(acc[4 * j] * gate_factor, acc[4 * j + 2] * up_factor, limit);
    const float second = swiglu(acc[4 * j + 1] * gate_factor, acc[4 * j + 3] * up_factor, limit);
    const uint32_t pair = ptx::movmatrix_trans(pack_bf16(first, second));
    if (8 * j + (lane >> 2) < tile.rows) *reinterpret_cast<uint32_t*>(h + j * 1024) = pair;
  }
}

// FC2: y [route][H].
template <int kWidth>
__device__ __forceinline__ void store_output(const MoeLayerParams& params, const TileSlot& tile,
                                             const float (&acc)[kWidth / 2], int row_tile,
                                             int warp_in_group, int lane) {
  const int in_tile = row_tile - tile.tile.first_row_tile;
  const int column = row_tile * 64 + warp_in_group * 16 + 2 * (lane & 3);
  uint16_t* y = params.local.y + column;
  const float factor[2] = {tile.factors[in_tile][0], tile.factors[in_tile][1]};
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    const int row = 8 * j + (lane >> 2);
    uint32_t pair[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      pair[r] = ptx::movmatrix_trans(
          pack_bf16(acc[4 * j + 2 * r] * factor[r], acc[4 * j + 2 * r + 1] * factor[r]));
    }
    if (row < tile.rows) {
      uint16_t* out = y + int64_t{tile.route[row]} * params.hidden;
      *reinterpret_cast<uint32_t*>(out) = pair[0];
      *reinterpret_cast<uint32_t*>(out + 8) = pair[1];
    }
  }
}

}  // namespace expertd::cuda::moe_layer
