#pragma once

#include "kernels/cuda/ptx/memory.cuh"
#include "kernels/cuda/ptx/warp.cuh"
#include "kernels/layout/packed_weights.h"

// The architecture's part of the arithmetic: a thread's share of a packed unit (64 rows x 128 K)
// from shared memory, expanded in registers to the A fragments of wgmma m64nNk16 in BF16. Exact.
namespace expertd::cuda::moe_layer {

template <layout::WeightFormat kFormat>
struct PackedFragment {
  static constexpr int kScaleWords = kFormat == layout::WeightFormat::kMx ? 1 : 2;

  uint4 codes[2];                   // by half of the unit
  uint32_t scales[2][kScaleWords];  // by row g, g + 8

  // `codes_address`: the thread's place in the unit; `scales_address`: its row pair's.
  __device__ __forceinline__ void load(uint32_t codes_address, uint32_t scales_address) {
    codes[0] = ptx::ld_shared_v4(codes_address);
    codes[1] = ptx::ld_shared_v4(codes_address + layout::kUnitThreads * 16);
    if constexpr (kFormat == layout::WeightFormat::kMx) {
      const uint2 words = ptx::ld_shared_v2(scales_address);
      scales[0][0] = words.x;
      scales[1][0] = words.y;
    } else {
      const uint4 words = ptx::ld_shared_v4(scales_address);
      scales[0][0] = words.x;
      scales[0][1] = words.y;
      scales[1][0] = words.z;
      scales[1][1] = words.w;
    }
  }
};

// Multipliers of a unit: constants[row half][i], BF16 pairs. MXFP4: blocks of K32 2 i (low), 2 i +
// 1 (high). NVFP4: the two K16 of block i.
template <layout::WeightFormat kFormat>
struct ScaleFragment {
  uint32_t constants[2][PackedFragment<kFormat>::kScaleWords * 2];

  __device__ __forceinline__ explicit ScaleFragment(const PackedFragment<kFormat>& packed) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int w = 0; w < PackedFragment<kFormat>::kScaleWords; ++w) {
        uint32_t pair[2];
        layout::ScaleConstants(kFormat, packed.scales[row][w], pair);
        constants[row][2 * w] = pair[0];
        constants[row][2 * w + 1] = pair[1];
      }
    }
  }
};

// K32 block `kBlock` (0..3) of the unit: the A fragments of its two k16 steps.
template <layout::WeightFormat kFormat, int kBlock>
__device__ __forceinline__ void dequantise_block(const PackedFragment<kFormat>& packed,
                                                 const ScaleFragment<kFormat>& scale,
                                                 uint32_t (&first)[4], uint32_t (&second)[4]) {
  const uint4& words = packed.codes[kBlock / 2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t word =
        kBlock % 2 == 0 ? (row == 0 ? words.x : words.y) : (row == 0 ? words.z : words.w);
    uint32_t pairs[4];
    layout::DequantiseWord(word, pairs);
    if constexpr (kFormat == layout::WeightFormat::kMx) {
      constexpr bool kHigh = kBlock % 2 != 0;
      const uint32_t constant = scale.constants[row][kBlock / 2];
      first[row] = ptx::mul_bf16x2_broadcast<kHigh>(pairs[0], constant);
      first[row + 2] = ptx::mul_bf16x2_broadcast<kHigh>(pairs[1], constant);
      second[row] = ptx::mul_bf16x2_broadcast<kHigh>(pairs[2], constant);
      second[row + 2] = ptx::mul_bf16x2_broadcast<kHigh>(pairs[3], constant);
    } else {
      const uint32_t constant = scale.constants[row][kBlock];
      first[row] = ptx::mul_bf16x2_broadcast<false>(pairs[0], constant);
      first[row + 2] = ptx::mul_bf16x2_broadcast<false>(pairs[1], constant);
      second[row] = ptx::mul_bf16x2_broadcast<true>(pairs[2], constant);
      second[row + 2] = ptx::mul_bf16x2_broadcast<true>(pairs[3], constant);
    }
  }
}

}  // namespace expertd::cuda::moe_layer
