#pragma once

#include <cstdint>

#include "config/model_spec.h"
#include "kernels/cuda/pack_weights.h"
#include "kernels/cuda/unfused_moe.h"
#include "kernels/layout/packed_weights.h"

// Where the plain kernels get dequantised weights from. A source has
//   load8(slot, matrix, row, col, values): 8 values of a row from column col (a multiple of 8),
//   factor(slot, matrix, row): what a row's sum is multiplied by.
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

  __device__ float factor(int32_t slot, Matrix matrix, int64_t /*row*/) const {
    return layer.second_level[slot * kNumMatrices + static_cast<int>(matrix)];
  }
};

// Matrices in the packed layout, read as the tensor-core kernel reads them.
template <Recipe kRecipe>
struct PackedSource {
  PackedLayer layer;
  layout::PackedMatrix fc1;
  layout::PackedMatrix fc2;

  static constexpr layout::WeightFormat kFormat = FormatOf(kRecipe);

  __device__ static int packed_row(Matrix matrix, int64_t row) {
    const int r = static_cast<int>(row);
    return matrix == Matrix::kDown ? r : layout::Fc1Row(r, matrix == Matrix::kUp ? 1 : 0);
  }

  // The 8 columns are one pair of codes in the words of a quad of threads.
  __device__ void load8(int32_t slot, Matrix matrix, int64_t row, int64_t col,
                        float (&values)[8]) const {
    const layout::PackedMatrix& packed = matrix == Matrix::kDown ? fc2 : fc1;
    const int r = packed_row(matrix, row);
    const int tile_row = r % layout::kTileRows;
    const int k = static_cast<int>(col) % layout::kUnitK;
    const int block = k / 32;
    const int pair = k % 32 / 8;
    const uint8_t* unit =
        (matrix == Matrix::kDown ? layer.fc2_units : layer.fc1_units) + slot * packed.slot_bytes() +
        packed.unit_offset(r / layout::kTileRows, static_cast<int>(col) / layout::kUnitK);
    const float scale = block_scale(unit, tile_row, block, pair);
    const int quad = tile_row / 16 * 32 + tile_row % 8 * 4;
    const int i = block % 2 * 2 + layout::RowHalf(tile_row);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t pairs[4];
      layout::DequantiseWord(
          *reinterpret_cast<const uint32_t*>(unit + layout::CodeWordOffset(block / 2, quad + t, i)),
          pairs);
      const uint32_t low = pair % 2 == 0 ? pairs[0] : pairs[1];  // no indexing of registers
      const uint32_t high = pair % 2 == 0 ? pairs[2] : pairs[3];
      const uint32_t both = pair < 2 ? low : high;
      values[2 * t] = __uint_as_float(both << 16) * scale;
      values[2 * t + 1] = __uint_as_float(both & 0xffff0000u) * scale;
    }
  }

  __device__ float factor(int32_t slot, Matrix matrix, int64_t row) const {
    const layout::PackedMatrix& packed = matrix == Matrix::kDown ? fc2 : fc1;
    const int r = packed_row(matrix, row);
    const float* factors = matrix == Matrix::kDown ? layer.fc2_factors : layer.fc1_factors;
    return factors[slot * packed.scales_per_slot() + r / layout::kTileRows * 2 +
                   layout::RowHalf(r)];
  }

 private:
  // The BF16 constant that the codes of (row, block of 32, pair) are multiplied by.
  __device__ static float block_scale(const uint8_t* unit, int tile_row, int block, int pair) {
    const bool mx = kFormat == layout::WeightFormat::kMx;
    const int word = mx ? 0 : block / 2;
    const int j = mx ? block : block % 2 * 2 + pair / 2;
    uint32_t constants[2];
    layout::ScaleConstants(
        kFormat,
        *reinterpret_cast<const uint32_t*>(unit + layout::ScaleWordOffset(kFormat, tile_row, word)),
        constants);
    const uint32_t both = j < 2 ? constants[0] : constants[1];
    return __uint_as_float(j % 2 == 0 ? both << 16 : both & 0xffff0000u);
  }
};

}  // namespace expertd::cuda
