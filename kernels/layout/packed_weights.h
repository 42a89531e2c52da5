#pragma once

#include <cstdint>

#include "kernels/layout/host_device.h"

// How FP4 weights lie in device memory for the tensor cores: the byte layout, once for host and
// device.
//
// A matrix of one expert slot is cut into units of 64 rows (one tile) x 128 K (the last unit of a
// row may be padded with zero codes). Units lie [group of 4 tiles][unit of K][tile of the group];
// the last group may be narrower. A unit has no padding bytes:
//
//   4096 B codes   [half h 0..1][thread 0..127][word i 0..3], one 16-byte load a thread and half
//   then scales    MXFP4 256 B: [row g of a 16-row slab: slab * 8 + g][row g, row g + 8] one word
//                  NVFP4 512 B: the same with two words a row
//
// Word (h, i) of thread t: K32 block 2h + (i >> 1), row 16 * (t / 32) + (t % 32) / 4 + 8 * (i & 1).
// Its 8 codes are pairs p = 0..3, k = 16 * (p >> 1) + 8 * (p & 1) + 2 * (t % 4) + {0, 1}: the
// A fragment of m64nNk16 with registers (row, p even), (row + 8, p even), (row, p odd), (row + 8, p
// odd).
namespace expertd::layout {

enum class WeightFormat {
  kMx,  // UE8M0 per 32 of K
  kNv,  // E4M3 per 16 of K, plus one F32 a matrix
};

inline constexpr int kTileRows = 64;
inline constexpr int kUnitK = 128;
inline constexpr int kGroupTiles = 4;
inline constexpr int kUnitThreads = 128;
inline constexpr int kUnitCodeBytes = kTileRows * kUnitK / 2;
inline constexpr int kMxUnitBytes = kUnitCodeBytes + kTileRows * 4;
inline constexpr int kNvUnitBytes = kUnitCodeBytes + kTileRows * 8;

EXPERTD_HD constexpr int UnitBytes(WeightFormat format) {
  return format == WeightFormat::kMx ? kMxUnitBytes : kNvUnitBytes;
}

// One matrix of one slot. FC1 is gate and up interleaved (rows = 2 I, k = H), FC2 is down (rows =
// H, k = I). rows is a multiple of 64, k of 32.
struct PackedMatrix {
  WeightFormat format = WeightFormat::kMx;
  int rows = 0;
  int k = 0;

  EXPERTD_HD constexpr int num_tiles() const { return rows / kTileRows; }
  EXPERTD_HD constexpr int num_units_k() const { return (k + kUnitK - 1) / kUnitK; }
  EXPERTD_HD constexpr int64_t slot_bytes() const {
    return int64_t{1} * num_tiles() * num_units_k() * UnitBytes(format);
  }
  // Tiles in the group of `tile`: the step in units from one K unit to the next.
  EXPERTD_HD constexpr int group_width(int tile) const {
    const int left = num_tiles() - tile / kGroupTiles * kGroupTiles;
    return left < kGroupTiles ? left : kGroupTiles;
  }
  // Byte offset of a unit inside its slot.
  EXPERTD_HD constexpr int64_t unit_offset(int tile, int unit_k) const {
    const int first = tile / kGroupTiles * kGroupTiles;
    return (int64_t{1} * first * num_units_k() + int64_t{1} * unit_k * group_width(tile) +
            (tile - first)) *
           UnitBytes(format);
  }
  // Beside the units: [slot][tile][half] F32, what the accumulators of rows s < 8 (half 0) and
  // s >= 8 (half 1) of every 16-row slab are multiplied by (block-scale base x second level).
  EXPERTD_HD constexpr int scales_per_slot() const { return num_tiles() * 2; }
};

// Rows of a packed tile: 16-row slabs of 8 + 8. In FC1 the first 8 are gate and the last 8 up of
// the same 8 columns of the intermediate, so that one thread holds both; half = 1 means the last 8.
EXPERTD_HD constexpr int RowHalf(int row) { return (row >> 3) & 1; }
// Gate or up row `column` of [I, H] goes to this packed row (up: half 1).
EXPERTD_HD constexpr int Fc1Row(int column, int half) {
  return column / 8 * 16 + half * 8 + column % 8;
}
EXPERTD_HD constexpr int Fc1Column(int row) { return row / 16 * 8 + row % 8; }

// --- places inside a unit
EXPERTD_HD constexpr int CodeWordOffset(int half, int thread, int i) {
  return ((half * kUnitThreads + thread) * 4 + i) * 4;
}
EXPERTD_HD constexpr int WordRow(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + 8 * (i & 1);
}
EXPERTD_HD constexpr int WordBlock(int half, int i) {
  return 2 * half + (i >> 1);
}  // K32 block 0..3
EXPERTD_HD constexpr int WordK(int block, int thread, int pair, int which) {
  return 32 * block + 16 * (pair >> 1) + 8 * (pair & 1) + 2 * (thread % 4) + which;
}
// Offset in the unit of the scale word of a tile row; word 0..1 for NVFP4 (K64 each), 0 for MXFP4.
EXPERTD_HD constexpr int ScaleWordOffset(WeightFormat format, int row, int word) {
  const int place = (row / 16 * 8 + row % 8) * 2 + RowHalf(row);
  return kUnitCodeBytes + (format == WeightFormat::kMx ? place * 4 : place * 8 + word * 4);
}

// --- a code word: the bits of code (pair p, which) lie so that five logic operations, a rotate, a
// shift and a multiplication (DequantiseWord) give four BF16 pairs of value * 2^-126. The bits of
// pair 3 are scattered: its product holds copies of them shifted by 2, 7 and 12, of which no two
// meet.
EXPERTD_HD constexpr uint32_t RotateRight(uint32_t value, int n) {
  return (n & 31) == 0 ? value : (value >> (n & 31)) | (value << (32 - (n & 31)));
}
EXPERTD_HD constexpr int CodeBit(int pair, int which,
                                 int bit) {  // bit 3 = sign .. bit 0 = mantissa
  constexpr int kScattered[4] = {4, 0, 1, 3};
  const int target = bit == 3 ? 15 : 6 + bit;
  return ((pair == 3 ? kScattered[bit] : target + 3 * pair) + 16 * which) & 31;
}
EXPERTD_HD constexpr uint32_t PlaceCode(uint32_t code, int pair, int which) {
  uint32_t word = 0;
  for (int bit = 0; bit < 4; ++bit) word |= ((code >> bit) & 1u) << CodeBit(pair, which, bit);
  return word;
}
EXPERTD_HD constexpr uint32_t ExtractCode(uint32_t word, int pair, int which) {
  uint32_t code = 0;
  for (int bit = 0; bit < 4; ++bit) code |= ((word >> CodeBit(pair, which, bit)) & 1u) << bit;
  return code;
}
inline constexpr uint32_t kCodeMask = 0x81C081C0u;  // sign, exponent and mantissa of two BF16
EXPERTD_HD constexpr void DequantiseWord(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t rotated = RotateRight(word, 6);
  pairs[0] = word & kCodeMask;
  pairs[1] = (rotated << 3) & kCodeMask;
  pairs[2] = rotated & kCodeMask;
  pairs[3] = ((word & 0x001B001Bu) * ((1u << 2) + (1u << 7) + (1u << 12))) & kCodeMask;
}

// --- scale words: four 8-bit values; the BF16 scale constants of blocks 0, 1 (low, high half) and
// of blocks 2, 3 after a rotate come out with one mask (ScaleConstants).
EXPERTD_HD constexpr uint32_t PlaceScale(WeightFormat format, uint32_t value, int j) {
  const int low = format == WeightFormat::kMx ? 7 : 4;
  return RotateRight(value & 0xffu, 32 - ((low + 16 * (j & 1) - 8 * (j >> 1)) & 31));
}
EXPERTD_HD constexpr void ScaleConstants(WeightFormat format, uint32_t word,
                                         uint32_t (&constants)[2]) {
  const uint32_t mask = format == WeightFormat::kMx ? 0x7F807F80u : 0x0FF00FF0u;
  const uint32_t bias = format == WeightFormat::kMx ? 0u : 0x70007000u;
  constants[0] = (word & mask) | bias;
  constants[1] = (RotateRight(word, 24) & mask) | bias;
}

// MXFP4. A constant is 2^(126 + e - base), so e - base must be at most 1; base belongs to the 32
// rows of (tile, half) and is 0 for every usual checkpoint. Exact while e - base >= -125. Byte 0 of
// a block of zeros (any byte, 255 too) is replaced: it must be finite, its value does not matter.
inline constexpr uint32_t kMxZeroBlock = 127;
EXPERTD_HD constexpr int MxBase(int max_byte) { return max_byte > 128 ? max_byte - 128 : 0; }
EXPERTD_HD constexpr uint32_t MxScale(int byte, int base) {
  return static_cast<uint32_t>(byte + 126 - base);
}

// NVFP4. The E4M3 scale becomes an unsigned E5M3 with exponent + 9 and no subnormals: the constant
// is scale * 2^(126 - 20), hence kNvFactor on the accumulators. A scale of zero needs zero codes.
inline constexpr float kNvFactor = 1048576.0f;  // 2^20
EXPERTD_HD constexpr uint32_t NvScale(uint32_t byte) {
  uint32_t exponent = (byte >> 3) & 15u;
  uint32_t mantissa = byte & 7u;
  if (exponent != 0) return (exponent + 2) << 3 | mantissa;  // 2^(exponent - 7): field exponent + 2
  if (mantissa == 0) return 0;
  exponent = 3;  // mantissa * 2^-9, normalised
  while (mantissa < 8) {
    mantissa <<= 1;
    --exponent;
  }
  return exponent << 3 | (mantissa & 7u);
}

}  // namespace expertd::layout
