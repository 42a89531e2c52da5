#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "kernels/formats.h"
#include "tests/kernels/cuda/simt/simt.h"

// Stands in for kernels/cuda/ptx/wgmma.cuh. A is read when the instruction is issued, B when its
// group is waited for: as late as the hardware may.
namespace expertd::cuda::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() { simt::CommitGroup(); }
template <int kPending>
void wgmma_wait() {
  simt::FinishGroups(kPending);
}

inline uint64_t descriptor(uint32_t chunk) {
  return uint64_t{64u | 1u << 30} << 32 | (chunk + (1u << 16));
}

// Element k of row n of B: rows of 128 bytes, swizzled by the address.
inline float b_element(const uint8_t* shared, uint32_t start, int n, int k) {
  const uint32_t address =
      start + static_cast<uint32_t>(n / 8 * 1024 + n % 8 * 128) + static_cast<uint32_t>(k) * 2;
  uint16_t bits;
  std::memcpy(&bits, shared + (address ^ (address >> 3 & 0x70u)), sizeof(bits));
  return Bf16ToFloat(bits);
}

template <int kN>
void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
  // Rows g and g + 8 of A: lane 4 g + t has k 2 t, 2 t + 1 and, in the upper words, 8 more.
  const simt::Word4* all = simt::Exchange("wgmma", {{a[0], a[1], a[2], a[3]}});
  const int lane = simt::lane();
  std::array<std::array<float, 16>, 2> rows;
  for (int k = 0; k < 16; ++k) {
    const simt::Word4& from = all[lane / 4 * 4 + k % 8 / 2];
    for (int row = 0; row < 2; ++row) {
      const uint32_t word = from.word[row + k / 8 * 2];
      rows[row][k] = Bf16ToFloat(static_cast<uint16_t>(word >> (16 * (k % 2))));
    }
  }
  const uint8_t* const shared = simt::dynamic_shared();
  const uint32_t start = static_cast<uint32_t>(b & 0x3fffu) << 4;
  float* const sums = d;
  simt::AddToGroup([=] {
    for (int j = 0; j < kN / 8; ++j) {
      for (int c = 0; c < 2; ++c) {
        for (int k = 0; k < 16; ++k) {
          const float x = b_element(shared, start, 8 * j + lane % 4 * 2 + c, k);
          sums[4 * j + c] += rows[0][k] * x;
          sums[4 * j + 2 + c] += rows[1][k] * x;
        }
      }
    }
  });
}

}  // namespace expertd::cuda::ptx
