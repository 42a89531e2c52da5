#pragma once

#include <cstdint>

// wgmma with BF16 inputs and f32 accumulators: D[64 x N] += A[64 x 16] B[16 x N], A from registers,
// B from shared memory (K-major, 128-byte swizzle).
namespace expertd::cuda::ptx {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// B's descriptor: rows of 128 bytes, groups of eight, 128-byte swizzle. `chunk`: address / 16.
__device__ __forceinline__ uint64_t descriptor(uint32_t chunk) {
  return uint64_t{64u | 1u << 30} << 32 | (chunk + (1u << 16));
}

template <int kN>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b);

#define EXPERTD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EXPERTD_L8 "%0, %1, %2, %3"
#define EXPERTD_L16 EXPERTD_L8 ", %4, %5, %6, %7"
#define EXPERTD_L24 EXPERTD_L16 ", %8, %9, %10, %11"
#define EXPERTD_L32 EXPERTD_L24 ", %12, %13, %14, %15"
#define EXPERTD_L40 EXPERTD_L32 ", %16, %17, %18, %19"
#define EXPERTD_L48 EXPERTD_L40 ", %20, %21, %22, %23"
#define EXPERTD_L56 EXPERTD_L48 ", %24, %25, %26, %27"
#define EXPERTD_L64 EXPERTD_L56 ", %28, %29, %30, %31"
#define EXPERTD_L72 EXPERTD_L64 ", %32, %33, %34, %35"
#define EXPERTD_L80 EXPERTD_L72 ", %36, %37, %38, %39"
#define EXPERTD_O8 EXPERTD_D4(0)
#define EXPERTD_O16 EXPERTD_O8, EXPERTD_D4(4)
#define EXPERTD_O24 EXPERTD_O16, EXPERTD_D4(8)
#define EXPERTD_O32 EXPERTD_O24, EXPERTD_D4(12)
#define EXPERTD_O40 EXPERTD_O32, EXPERTD_D4(16)
#define EXPERTD_O48 EXPERTD_O40, EXPERTD_D4(20)
#define EXPERTD_O56 EXPERTD_O48, EXPERTD_D4(24)
#define EXPERTD_O64 EXPERTD_O56, EXPERTD_D4(28)
#define EXPERTD_O72 EXPERTD_O64, EXPERTD_D4(32)
#define EXPERTD_O80 EXPERTD_O72, EXPERTD_D4(36)
// n: N; a0..a3, b: operand numbers behind the N / 2 accumulators.
#define EXPERTD_WGMMA(n, a0, a1, a2, a3, b)                                         \
  template <>                                                                       \
  __device__ __forceinline__ void wgmma<n>(float(&d)[n / 2], const uint32_t(&a)[4], \
                                           uint64_t descriptor) {                   \
    asm volatile(                                                                   \
        "{.reg .pred yes; setp.ne.b32 yes, 1, 0;"                                   \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" EXPERTD_L##n   \
        "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", yes, 1, 1, 0;}"      \
        : EXPERTD_O##n                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));             \
  }
EXPERTD_WGMMA(8, 4, 5, 6, 7, 8)
EXPERTD_WGMMA(16, 8, 9, 10, 11, 12)
EXPERTD_WGMMA(24, 12, 13, 14, 15, 16)
EXPERTD_WGMMA(32, 16, 17, 18, 19, 20)
EXPERTD_WGMMA(40, 20, 21, 22, 23, 24)
EXPERTD_WGMMA(48, 24, 25, 26, 27, 28)
EXPERTD_WGMMA(56, 28, 29, 30, 31, 32)
EXPERTD_WGMMA(64, 32, 33, 34, 35, 36)
EXPERTD_WGMMA(72, 36, 37, 38, 39, 40)
EXPERTD_WGMMA(80, 40, 41, 42, 43, 44)
#undef EXPERTD_L8
#undef EXPERTD_O8
#undef EXPERTD_L16
#undef EXPERTD_O16
#undef EXPERTD_L24
#undef EXPERTD_O24
#undef EXPERTD_L32
#undef EXPERTD_O32
#undef EXPERTD_L40
#undef EXPERTD_O40
#undef EXPERTD_L48
#undef EXPERTD_O48
#undef EXPERTD_L56
#undef EXPERTD_O56
#undef EXPERTD_L64
#undef EXPERTD_O64
#undef EXPERTD_L72
#undef EXPERTD_O72
#undef EXPERTD_L80
#undef EXPERTD_O80
#undef EXPERTD_D4
#undef EXPERTD_WGMMA

}  // namespace expertd::cuda::ptx
