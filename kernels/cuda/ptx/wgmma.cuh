#pragma once

#include <cstdint>

// wgmma with BF16 inputs and f32 accumulators: D[64 x N] += A[64 x 16] B[16 x N], A from registers, B from
// shared memory (K-major, 128-byte swizzle).
namespace expertd::cuda::ptx {

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Low word of a B descriptor: (address >> 4) | kDescriptorLow. The high word is in the code below: rows of
// 128 bytes, groups of eight, 128-byte swizzle.
inline constexpr uint32_t kDescriptorLow = 1u << 16;

inline constexpr int kMaxN = 80;
inline constexpr int kAccumulators = kMaxN / 2;  // of one 64-row tile
inline constexpr int kRowTiles = 2;              // 64-row tiles a warpgroup multiplies side by side

// Which instructions wgmma_k64 executes.
__device__ __forceinline__ uint32_t wgmma_variant(int n, int row_tiles) {
  return (n / 8 - 1) + (row_tiles == 1 ? kMaxN / 8 : 0);
}

// Register lists: the first N / 2 of the first and of the second tile's accumulators.
#define EXPERTD_P8 "%0, %1, %2, %3"
#define EXPERTD_P16 EXPERTD_P8 ", %4, %5, %6, %7"
#define EXPERTD_P24 EXPERTD_P16 ", %8, %9, %10, %11"
#define EXPERTD_P32 EXPERTD_P24 ", %12, %13, %14, %15"
#define EXPERTD_P40 EXPERTD_P32 ", %16, %17, %18, %19"
#define EXPERTD_P48 EXPERTD_P40 ", %20, %21, %22, %23"
#define EXPERTD_P56 EXPERTD_P48 ", %24, %25, %26, %27"
#define EXPERTD_P64 EXPERTD_P56 ", %28, %29, %30, %31"
#define EXPERTD_P72 EXPERTD_P64 ", %32, %33, %34, %35"
#define EXPERTD_P80 EXPERTD_P72 ", %36, %37, %38, %39"
#define EXPERTD_Q8 "%40, %41, %42, %43"
#define EXPERTD_Q16 EXPERTD_Q8 ", %44, %45, %46, %47"
#define EXPERTD_Q24 EXPERTD_Q16 ", %48, %49, %50, %51"
#define EXPERTD_Q32 EXPERTD_Q24 ", %52, %53, %54, %55"
#define EXPERTD_Q40 EXPERTD_Q32 ", %56, %57, %58, %59"
#define EXPERTD_Q48 EXPERTD_Q40 ", %60, %61, %62, %63"
#define EXPERTD_Q56 EXPERTD_Q48 ", %64, %65, %66, %67"
#define EXPERTD_Q64 EXPERTD_Q56 ", %68, %69, %70, %71"
#define EXPERTD_Q72 EXPERTD_Q64 ", %72, %73, %74, %75"
#define EXPERTD_Q80 EXPERTD_Q72 ", %76, %77, %78, %79"
#define EXPERTD_MMA(n, list, a, b) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list "}, " a ", " b ", yes, 1, 1, 0;\n"
#define EXPERTD_BEGIN(label, n) "$" #label #n "_%=:\nwgmma.fence.sync.aligned;\n"
#define EXPERTD_END "wgmma.commit_group.sync.aligned;\nbra.uni $End_%=;\n"
// Both tiles, or the first one only, of one N.
#define EXPERTD_TWO(n) \
  EXPERTD_BEGIN(Two, n) \
  EXPERTD_MMA(n, EXPERTD_P##n, "{%80, %81, %82, %83}", "b0") \
  EXPERTD_MMA(n, EXPERTD_Q##n, "{%96, %97, %98, %99}", "b0") \
  EXPERTD_MMA(n, EXPERTD_P##n, "{%84, %85, %86, %87}", "b1") \
  EXPERTD_MMA(n, EXPERTD_Q##n, "{%100, %101, %102, %103}", "b1") \
  EXPERTD_MMA(n, EXPERTD_P##n, "{%88, %89, %90, %91}", "b2") \
  EXPERTD_MMA(n, EXPERTD_Q##n, "{%104, %105, %106, %107}", "b2") \
  EXPERTD_MMA(n, EXPERTD_P##n, "{%92, %93, %94, %95}", "b3") \
  EXPERTD_MMA(n, EXPERTD_Q##n, "{%108, %109, %110, %111}", "b3") \
  EXPERTD_END
#define EXPERTD_ONE(n) \
  EXPERTD_BEGIN(One, n) \
  EXPERTD_MMA(n, EXPERTD_P##n, "{%80, %81, %82, %83}", "b0") \
  EXPERTD_MMA(n, EXPERTD_P##n, "{%84, %85, %86, %87}", "b1") \
  EXPERTD_MMA(n, EXPERTD_P##n, "{%88, %89, %90, %91}", "b2") \
  EXPERTD_MMA(n, EXPERTD_P##n, "{%92, %93, %94, %95}", "b3") \
  EXPERTD_END
#define EXPERTD_OUT4(t, i) "+f"(d[t][i]), "+f"(d[t][i + 1]), "+f"(d[t][i + 2]), "+f"(d[t][i + 3])
#define EXPERTD_OUT40(t)                                                                    \
  EXPERTD_OUT4(t, 0), EXPERTD_OUT4(t, 4), EXPERTD_OUT4(t, 8), EXPERTD_OUT4(t, 12),          \
      EXPERTD_OUT4(t, 16), EXPERTD_OUT4(t, 20), EXPERTD_OUT4(t, 24), EXPERTD_OUT4(t, 28),   \
      EXPERTD_OUT4(t, 32), EXPERTD_OUT4(t, 36)
#define EXPERTD_IN4(t, s) "r"(a[t][s][0]), "r"(a[t][s][1]), "r"(a[t][s][2]), "r"(a[t][s][3])
#define EXPERTD_IN16(t) \
  EXPERTD_IN4(t, 0), EXPERTD_IN4(t, 1), EXPERTD_IN4(t, 2), EXPERTD_IN4(t, 3)

// A group of four k16 steps, K64, of one or two row tiles, for any N up to kMaxN: D += A B, where D is the
// first N / 2 registers of d[tile]. Fence, products and commit are one asm block with one jump, so that
// the compiler keeps one set of accumulators for all N and lets groups overlap; it does neither when each N
// has its own code. The variant is the same for the whole warpgroup.
__device__ __forceinline__ void wgmma_k64(float (&d)[kRowTiles][kAccumulators],
                                          const uint32_t (&a)[kRowTiles][4][4],
                                          uint32_t descriptor_low, uint32_t variant) {
  asm volatile(
      "{\n.reg .pred yes;\n.reg .b32 l1, l2, l3;\n.reg .b64 b0, b1, b2, b3;\n"
      "setp.ne.b32 yes, 1, 0;\n"
      "add.u32 l1, %112, 2;\nadd.u32 l2, %112, 4;\nadd.u32 l3, %112, 6;\n"
      "mov.b64 b0, {%112, 0x40000040};\nmov.b64 b1, {l1, 0x40000040};\n"
      "mov.b64 b2, {l2, 0x40000040};\nmov.b64 b3, {l3, 0x40000040};\n"
      "$Table_%=: .branchtargets $Two8_%=, $Two16_%=, $Two24_%=, $Two32_%=, $Two40_%=, $Two48_%=, "
      "$Two56_%=, $Two64_%=, $Two72_%=, $Two80_%=, $One8_%=, $One16_%=, $One24_%=, $One32_%=, "
      "$One40_%=, $One48_%=, $One56_%=, $One64_%=, $One72_%=, $One80_%=;\n"
      "brx.idx.uni %113, $Table_%=;\n"
      // clang-format off
      EXPERTD_TWO(8)
      EXPERTD_TWO(16)
      EXPERTD_TWO(24)
      EXPERTD_TWO(32)
      EXPERTD_TWO(40)
      EXPERTD_TWO(48)
      EXPERTD_TWO(56)
      EXPERTD_TWO(64)
      EXPERTD_TWO(72)
      EXPERTD_TWO(80)
      EXPERTD_ONE(8)
      EXPERTD_ONE(16)
      EXPERTD_ONE(24)
      EXPERTD_ONE(32)
      EXPERTD_ONE(40)
      EXPERTD_ONE(48)
      EXPERTD_ONE(56)
      EXPERTD_ONE(64)
      EXPERTD_ONE(72)
      EXPERTD_ONE(80)
      // clang-format on
      "$End_%=:\n}"
      : EXPERTD_OUT40(0), EXPERTD_OUT40(1)
      : EXPERTD_IN16(0), EXPERTD_IN16(1), "r"(descriptor_low), "r"(variant)
      : "memory");
}

#undef EXPERTD_P8
#undef EXPERTD_Q8
#undef EXPERTD_P16
#undef EXPERTD_Q16
#undef EXPERTD_P24
#undef EXPERTD_Q24
#undef EXPERTD_P32
#undef EXPERTD_Q32
#undef EXPERTD_P40
#undef EXPERTD_Q40
#undef EXPERTD_P48
#undef EXPERTD_Q48
#undef EXPERTD_P56
#undef EXPERTD_Q56
#undef EXPERTD_P64
#undef EXPERTD_Q64
#undef EXPERTD_P72
#undef EXPERTD_Q72
#undef EXPERTD_P80
#undef EXPERTD_Q80
#undef EXPERTD_MMA
#undef EXPERTD_BEGIN
#undef EXPERTD_END
#undef EXPERTD_TWO
#undef EXPERTD_ONE
#undef EXPERTD_OUT4
#undef EXPERTD_OUT40
#undef EXPERTD_IN4
#undef EXPERTD_IN16

}  // namespace expertd::cuda::ptx
