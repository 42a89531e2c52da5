#pragma once

#include <cstdint>

// wgmma with BF16 inputs and f32 accumulators: D[64 x N] (+)= A[64 x 16] B[16 x N], A from registers, B from
// shared memory (K-major, 128-byte swizzle).
namespace expertd::cuda::ptx {

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Low word of a B descriptor is (address >> 4) | kDescriptorLow; rows of 128 bytes, groups of eight.
inline constexpr uint32_t kDescriptorLow = 1u << 16;
inline constexpr uint32_t kDescriptorHigh = 64u | 1u << 30;

inline constexpr int kMaxN = 80;
inline constexpr int kAccumulators = kMaxN / 2;

// A group of four k16 steps, K64, for any N = 8 (n_index + 1) up to kMaxN: D += A B, where D is the first
// N / 2 registers of d. Fence, products and commit are one asm block with one jump, so that the compiler
// keeps one set of accumulators for all N and lets groups overlap; it does neither when each N has its
// own code. N is the same for the whole warpgroup.
#define EXPERTD_D8 "%0, %1, %2, %3"
#define EXPERTD_D16 EXPERTD_D8 ", %4, %5, %6, %7"
#define EXPERTD_D24 EXPERTD_D16 ", %8, %9, %10, %11"
#define EXPERTD_D32 EXPERTD_D24 ", %12, %13, %14, %15"
#define EXPERTD_D40 EXPERTD_D32 ", %16, %17, %18, %19"
#define EXPERTD_D48 EXPERTD_D40 ", %20, %21, %22, %23"
#define EXPERTD_D56 EXPERTD_D48 ", %24, %25, %26, %27"
#define EXPERTD_D64 EXPERTD_D56 ", %28, %29, %30, %31"
#define EXPERTD_D72 EXPERTD_D64 ", %32, %33, %34, %35"
#define EXPERTD_D80 EXPERTD_D72 ", %36, %37, %38, %39"
#define EXPERTD_STEP(n, list, a, b) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list "}, " a ", " b ", yes, 1, 1, 0;\n"
#define EXPERTD_STEPS(n, list)                                         \
  "$N" #n "_%=:\nwgmma.fence.sync.aligned;\n"                          \
  EXPERTD_STEP(n, list, "{%40, %41, %42, %43}", "%56") \
  EXPERTD_STEP(n, list, "{%44, %45, %46, %47}", "b1") \
  EXPERTD_STEP(n, list, "{%48, %49, %50, %51}", "b2") \
  EXPERTD_STEP(n, list, "{%52, %53, %54, %55}", "b3") \
  "wgmma.commit_group.sync.aligned;\nbra.uni $End_%=;\n"
#define EXPERTD_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EXPERTD_IN4(s) "r"(a[s][0]), "r"(a[s][1]), "r"(a[s][2]), "r"(a[s][3])

__device__ __forceinline__ void wgmma_k64(float (&d)[kAccumulators], const uint32_t (&a)[4][4],
                                          uint64_t b, uint32_t n_index) {
  asm volatile(
      "{\n.reg .pred yes;\n.reg .b64 b1, b2, b3;\nsetp.ne.b32 yes, 1, 0;\n"
      "add.s64 b1, %56, 2;\nadd.s64 b2, %56, 4;\nadd.s64 b3, %56, 6;\n"
      "$Table_%=: .branchtargets $N8_%=, $N16_%=, $N24_%=, $N32_%=, $N40_%=, $N48_%=, $N56_%=, "
      "$N64_%=, $N72_%=, $N80_%=;\n"
      "brx.idx.uni %57, $Table_%=;\n"
      // clang-format off
      EXPERTD_STEPS(8, EXPERTD_D8)
      EXPERTD_STEPS(16, EXPERTD_D16)
      EXPERTD_STEPS(24, EXPERTD_D24)
      EXPERTD_STEPS(32, EXPERTD_D32)
      EXPERTD_STEPS(40, EXPERTD_D40)
      EXPERTD_STEPS(48, EXPERTD_D48)
      EXPERTD_STEPS(56, EXPERTD_D56)
      EXPERTD_STEPS(64, EXPERTD_D64)
      EXPERTD_STEPS(72, EXPERTD_D72)
      EXPERTD_STEPS(80, EXPERTD_D80)
      // clang-format on
      "$End_%=:\n}"
      : EXPERTD_OUT4(0), EXPERTD_OUT4(4), EXPERTD_OUT4(8), EXPERTD_OUT4(12),
        EXPERTD_OUT4(16), EXPERTD_OUT4(20), EXPERTD_OUT4(24), EXPERTD_OUT4(28),
        EXPERTD_OUT4(32), EXPERTD_OUT4(36)
      : EXPERTD_IN4(0), EXPERTD_IN4(1), EXPERTD_IN4(2), EXPERTD_IN4(3), "l"(b), "r"(n_index)
      : "memory");
}

#undef EXPERTD_D8
#undef EXPERTD_D16
#undef EXPERTD_D24
#undef EXPERTD_D32
#undef EXPERTD_D40
#undef EXPERTD_D48
#undef EXPERTD_D56
#undef EXPERTD_D64
#undef EXPERTD_D72
#undef EXPERTD_D80
#undef EXPERTD_STEP
#undef EXPERTD_STEPS
#undef EXPERTD_OUT4
#undef EXPERTD_IN4

}  // namespace expertd::cuda::ptx
