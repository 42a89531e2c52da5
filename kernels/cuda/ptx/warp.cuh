#pragma once

#include <cstdint>

// What a warp or warpgroup does with its registers.
namespace expertd::cuda::ptx {

// Whole warpgroup. Registers come from those allocated at launch: an increase waits until enough
// warps have decreased.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Hardware barrier of `threads` threads of the CTA, whole warps that all come to it at the same
// instruction.
template <int kBarrier>
__device__ __forceinline__ void barrier_sync_aligned(int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}
// The same where warps of different roles come to it at instructions of their own. Takes longer:
// the lanes of a warp are gathered first.
template <int kBarrier>
__device__ __forceinline__ void barrier_sync(int threads) {
  asm volatile("barrier.sync %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}

// Counts as one of `threads` at the barrier, and does not wait: others do, in barrier_sync().
template <int kBarrier>
__device__ __forceinline__ void barrier_arrive(int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}

// Read anew each time: addresses that depend on it are not kept in registers across a loop.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
  return lane;
}

// True on one lane of the warp, all of which are here: always the same one, so that it need not be
// asked again.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm("{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// The value, in a register, and nothing that the compiler knows of how it came about.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  uint32_t same;
  asm("mov.b32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}

// Transposes an 8x8 matrix of 16-bit elements: lane 4 r + c holds row r, columns 2 c and 2 c + 1.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t fragment) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
  return result;
}

// BF16x2 product with the low or the high half of `scale` for both; the broadcast costs nothing.
template <bool kHigh>
__device__ __forceinline__ uint32_t mul_bf16x2_broadcast(uint32_t pair, uint32_t scale) {
  uint32_t result;
  if constexpr (kHigh) {
    asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h};"
        "mul.rn.bf16x2 %0, %1, t;}"
        : "=r"(result)
        : "r"(pair), "r"(scale));
  } else {
    asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l};"
        "mul.rn.bf16x2 %0, %1, t;}"
        : "=r"(result)
        : "r"(pair), "r"(scale));
  }
  return result;
}

}  // namespace expertd::cuda::ptx
