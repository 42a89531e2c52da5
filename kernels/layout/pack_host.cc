#include "kernels/layout/pack_host.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "config/check.h"
#include "kernels/formats.h"

namespace expertd::layout {
namespace {

constexpr int kMxGroup = 32;
constexpr int kNvGroup = 16;

class Packer {
 public:
  Packer(const PackedMatrix& packed, Rows rows, const CanonicalMatrix& matrix)
      : packed_(packed),
        rows_(rows),
        matrix_(matrix),
        group_(packed.format == WeightFormat::kMx ? kMxGroup : kNvGroup) {}

  uint32_t Code(int row, int k) const {
    if (k >= matrix_.in) return 0;
    const uint8_t byte = matrix_.codes[(static_cast<int64_t>(row) * matrix_.in + k) / 2];
    const uint32_t code = k % 2 == 0 ? byte & 15u : byte >> 4;
    if (packed_.format == WeightFormat::kMx) return code;
    const uint8_t scale = ScaleByte(row, k / group_);
    return (scale & 0x7f) == 0 ? 0 : (scale & 0x80) ? code ^ 8u : code;
  }

  uint8_t ScaleByte(int row, int block) const {
    return matrix_.scales[static_cast<int64_t>(row) * (matrix_.in / group_) + block];
  }

  bool BlockIsZero(int row, int block) const {
    for (int k = block * group_; k < (block + 1) * group_; ++k) {
      if (Code(row, k) & 7u) return false;
    }
    return true;
  }

  // The packed 8-bit value of a block; blocks past the end are zero.
  uint32_t PackedScale(int row, int block, int base) const {
    const bool past_end = block >= matrix_.in / group_;
    if (packed_.format == WeightFormat::kNv)
      return past_end ? 0 : NvScale(ScaleByte(row, block) & 0x7f);
    if (past_end || BlockIsZero(row, block)) return kMxZeroBlock;
    return MxScale(ScaleByte(row, block), base);
  }

  // Largest scale byte of a non-zero block among this matrix's rows of (tile, half).
  int MaxByte(int tile, int half) const {
    int max_byte = 0;
    for (int row = 0; row < matrix_.out; ++row) {
      const int place = PackedRow(rows_, row);
      if (place / kTileRows != tile || RowHalf(place) != half) continue;
      for (int block = 0; block < matrix_.in / group_; ++block) {
        if (!BlockIsZero(row, block)) max_byte = std::max<int>(max_byte, ScaleByte(row, block));
      }
    }
    return max_byte;
  }

  bool Fills(int half) const { return rows_ == Rows::kAll || half == (rows_ == Rows::kUp ? 1 : 0); }

  int OutRow(int packed_row) const {
    return rows_ == Rows::kAll ? packed_row : Fc1Column(packed_row);
  }

 private:
  PackedMatrix packed_;
  Rows rows_;
  CanonicalMatrix matrix_;
  int group_;
};

void PackUnit(const PackedMatrix& packed, const Packer& packer, int tile, int unit_k,
              const int (&base)[2], uint8_t* unit) {
  for (int half = 0; half < 2; ++half) {
    for (int thread = 0; thread < kUnitThreads; ++thread) {
      for (int i = 0; i < 4; ++i) {
        const int row = WordRow(thread, i);
        if (!packer.Fills(RowHalf(row))) continue;
        uint32_t word = 0;
        for (int p = 0; p < 4; ++p) {
          for (int which = 0; which < 2; ++which) {
            const int k = unit_k * kUnitK + WordK(WordBlock(half, i), thread, p, which);
            word |= PlaceCode(packer.Code(packer.OutRow(tile * kTileRows + row), k), p, which);
          }
        }
        std::memcpy(unit + CodeWordOffset(half, thread, i), &word, 4);
      }
    }
  }
  const int words = packed.format == WeightFormat::kMx ? 1 : 2;
  for (int row = 0; row < kTileRows; ++row) {
    if (!packer.Fills(RowHalf(row))) continue;
    for (int w = 0; w < words; ++w) {
      uint32_t word = 0;
      for (int j = 0; j < 4; ++j) {
        const int block = (unit_k * words + w) * 4 + j;
        word |= PlaceScale(
            packed.format,
            packer.PackedScale(packer.OutRow(tile * kTileRows + row), block, base[RowHalf(row)]),
            j);
      }
      std::memcpy(unit + ScaleWordOffset(packed.format, row, w), &word, 4);
    }
  }
}

}  // namespace

void PackMatrix(const PackedMatrix& packed, Rows rows, const CanonicalMatrix& matrix,
                uint8_t* units, float* factors) {
  EXPERTD_CHECK(matrix.in == packed.k);
  EXPERTD_CHECK(matrix.out * (rows == Rows::kAll ? 1 : 2) == packed.rows);
  const Packer packer(packed, rows, matrix);
  for (int tile = 0; tile < packed.num_tiles(); ++tile) {
    int base[2] = {0, 0};
    for (int half = 0; half < 2; ++half) {
      if (!packer.Fills(half)) continue;
      const bool mx = packed.format == WeightFormat::kMx;
      if (mx) base[half] = MxBase(packer.MaxByte(tile, half));
      factors[tile * 2 + half] =
          matrix.second_level * (mx ? std::ldexp(1.0f, base[half]) : kNvFactor);
    }
    for (int unit_k = 0; unit_k < packed.num_units_k(); ++unit_k) {
      PackUnit(packed, packer, tile, unit_k, base, units + packed.unit_offset(tile, unit_k));
    }
  }
}

double UnpackWeight(const PackedMatrix& packed, const uint8_t* units, const float* factors, int row,
                    int k) {
  const uint8_t* unit = units + packed.unit_offset(row / kTileRows, k / kUnitK);
  const int tile_row = row % kTileRows;
  const int in_unit = k % kUnitK;
  const int in_block = in_unit % 32;
  const int block = in_unit / 32;
  const int pair = in_block / 16 * 2 + in_block / 8 % 2;
  const int thread = tile_row / 16 * 32 + tile_row % 8 * 4 + in_block % 8 / 2;

  uint32_t word = 0;
  std::memcpy(&word, unit + CodeWordOffset(block / 2, thread, block % 2 * 2 + RowHalf(tile_row)),
              4);
  uint32_t pairs[4] = {};
  DequantiseWord(word, pairs);

  const bool mx = packed.format == WeightFormat::kMx;
  const int scale_word = mx ? 0 : in_unit / 64;
  const int j = mx ? block : in_unit % 64 / 16;
  std::memcpy(&word, unit + ScaleWordOffset(packed.format, tile_row, scale_word), 4);
  uint32_t constants[2] = {};
  ScaleConstants(packed.format, word, constants);

  const uint16_t raw = static_cast<uint16_t>(pairs[pair] >> (16 * (in_block % 2)));
  const uint16_t scale = static_cast<uint16_t>(constants[j / 2] >> (16 * (j % 2)));
  const float product = Bf16ToFloat(raw) * Bf16ToFloat(scale);
  // The kernel's product is a BF16: rounding here shows whether it is exact.
  return static_cast<double>(Bf16ToFloat(FloatToBf16(product))) *
         factors[row / kTileRows * 2 + RowHalf(tile_row)];
}

}  // namespace expertd::layout
