#pragma once

#include <cstdint>

#include "config/model_spec.h"
#include "kernels/cuda/unfused_moe.h"

// Where the plain kernels get dequantised weights from. A source has
//   load8(slot, matrix, row, col, values): the 8 values of a row from column col (a multiple of 8),
//   second_level(slot, matrix).
namespace expertd::cuda {

// Exact for every code: the three magnitude bits lie where a float has them, 2^126 too small.
__device__ inline float decode_e2m1(uint32_t code) {
  const float magnitude = __uint_as_float((code & 7u) << 22) * 0x1p126f;
  return (code & 8u) ? -magnitude : magnitude;
}

// 2^(byte - 127); byte 255 does not occur (the loader refuses it).
__device__ inline float decode_ue8m0(uint32_t byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}

__device__ inline float decode_e4m3(uint32_t byte) {
  const float magnitude = __uint_as_float((byte & 0x7fu) << 20) * 0x1p120f;
  return (byte & 0x80u) ? -magnitude : magnitude;
}

template <Recipe kRecipe>
__device__ inline float decode_scale(uint32_t byte) {
  if constexpr (kRecipe == Recipe::kMxfp4) {
    return decode_ue8m0(byte);
  } else {
    return decode_e4m3(byte);
  }
}

// Matrices in file layout.
template <Recipe kRecipe>
struct CanonicalSource {
  CanonicalLayer layer;
  int64_t hidden_size;
  int64_t intermediate_size;

  __device__ void load8(int32_t slot, Matrix matrix, int64_t row, int64_t col,
                        float (&values)[8]) const {
    const bool down = matrix == Matrix::kDown;
    const int64_t out = down ? hidden_size : intermediate_size;
    const int64_t in = down ? intermediate_size : hidden_size;
    const int64_t line = slot * out + row;
    const int m = static_cast<int>(matrix);
    const auto codes =
        *reinterpret_cast<const uint32_t*>(layer.codes[m] + line * (in / 2) + col / 2);
    constexpr int64_t kGroup = ScaleGroup(kRecipe);
    const float scale = decode_scale<kRecipe>(layer.scales[m][line * (in / kGroup) + col / kGroup]);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = decode_e2m1(codes >> (4 * i)) * scale;
  }

  __device__ float second_level(int32_t slot, Matrix matrix) const {
    return layer.second_level[slot * kNumMatrices + static_cast<int>(matrix)];
  }
};

}  // namespace expertd::cuda
