#pragma once

#include <cstdint>

#include "kernels/formats.h"
#include "tests/kernels/cuda/simt/simt.h"

// Stands in for kernels/cuda/ptx/warp.cuh.
namespace expertd::cuda::ptx {

template <int kCount>
void setmaxnreg_inc() {}
template <int kCount>
void setmaxnreg_dec() {}

template <int kBarrier>
void barrier_sync(int threads) {
  simt::SyncBarrier(kBarrier, threads);
}

template <int kBarrier>
void barrier_sync_aligned(int threads) {
  simt::SyncBarrier(kBarrier, threads);
}

template <int kBarrier>
void barrier_arrive(int threads) {
  simt::ArriveAtBarrier(kBarrier, threads);
}

inline int lane_id() { return simt::lane(); }

inline bool elect_one() { return lane_id() == 0; }

inline uint32_t opaque(uint32_t value) { return value; }

inline uint32_t movmatrix_trans(uint32_t fragment) {
  const simt::Word4* all = simt::Exchange("movmatrix", {{fragment, 0, 0, 0}});
  const int row = simt::lane() / 4;
  const auto element = [&](int r, int c) {
    return all[4 * r + c / 2].word[0] >> (16 * (c % 2)) & 0xffffu;
  };
  const int column = simt::lane() % 4 * 2;
  return element(column, row) | element(column + 1, row) << 16;
}

template <bool kHigh>
uint32_t mul_bf16x2_broadcast(uint32_t pair, uint32_t scale) {
  const float factor = Bf16ToFloat(static_cast<uint16_t>(kHigh ? scale >> 16 : scale));
  const uint32_t low = FloatToBf16(Bf16ToFloat(static_cast<uint16_t>(pair)) * factor);
  const uint32_t high = FloatToBf16(Bf16ToFloat(static_cast<uint16_t>(pair >> 16)) * factor);
  return low | high << 16;
}

}  // namespace expertd::cuda::ptx
