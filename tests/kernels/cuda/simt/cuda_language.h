#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/simt/simt.h"

// CUDA C++ as far as the kernels use it, for a host compiler: included before everything else when
// a kernel is compiled for the emulation. Standard headers come first: some use the attribute
// names.

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define threadIdx (::expertd::simt::thread_index())
#define blockIdx (::expertd::simt::block_index())
#define gridDim (::expertd::simt::grid_size())

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

inline int __ffs(uint32_t value) { return value == 0 ? 0 : std::countr_zero(value) + 1; }
inline int __popc(uint32_t value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<uint32_t>(value)); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int32_t bits) { return std::bit_cast<float>(bits); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float value) { return std::exp(value); }

template <typename T>
T __ldcg(const T* address) {
  return *address;
}

inline void __syncthreads() { expertd::simt::SyncThreads(); }
inline void __threadfence_system() {}

// --- collectives of a whole warp; all of the kernels' masks are full

namespace expertd::simt {

template <typename T>
uint32_t Bits(T value) {
  static_assert(sizeof(T) == 4);
  return std::bit_cast<uint32_t>(value);
}
inline const Word4* Show(const char* what, uint32_t value) {
  return Exchange(what, {{value, 0, 0, 0}});
}

}  // namespace expertd::simt

inline void __syncwarp() { expertd::simt::Show("syncwarp", 0); }

template <typename T>
T __shfl_sync(uint32_t, T value, int source) {
  return std::bit_cast<T>(
      expertd::simt::Show("shfl", expertd::simt::Bits(value))[source % 32].word[0]);
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, int delta) {
  const auto* all = expertd::simt::Show("shfl.up", expertd::simt::Bits(value));
  const int from = expertd::simt::lane() - delta;
  return from < 0 ? value : std::bit_cast<T>(all[from].word[0]);
}
inline uint32_t __ballot_sync(uint32_t, bool predicate) {
  const auto* all = expertd::simt::Show("ballot", predicate ? 1 : 0);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= all[i].word[0] << i;
  return mask;
}
inline bool __any_sync(uint32_t mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline bool __all_sync(uint32_t mask, bool predicate) {
  return __ballot_sync(mask, predicate) == 0xffffffffu;
}
template <typename T>
uint32_t __match_any_sync(uint32_t, T value) {
  const auto* all = expertd::simt::Show("match", expertd::simt::Bits(value));
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) {
    if (all[i].word[0] == expertd::simt::Bits(value)) mask |= 1u << i;
  }
  return mask;
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
  const auto* all = expertd::simt::Show("reduce.or", value);
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result |= all[i].word[0];
  return result;
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const auto* all = expertd::simt::Show("reduce.min", value);
  uint32_t result = ~0u;
  for (int i = 0; i < 32; ++i) result = std::min(result, all[i].word[0]);
  return result;
}

// --- atomics: threads change only where they wait

template <typename T>
T atomicAdd(T* address, T value) {
  return std::exchange(*address, *address + value);
}
template <typename T>
T atomicMax(T* address, T value) {
  return std::exchange(*address, std::max(*address, value));
}
template <typename T>
T atomicMin(T* address, T value) {
  return std::exchange(*address, std::min(*address, value));
}
template <typename T>
T atomicOr(T* address, T value) {
  return std::exchange(*address, *address | value);
}
inline uint32_t atomicCAS_system(uint32_t* address, uint32_t compare, uint32_t value) {
  const uint32_t old = *address;
  if (old == compare) *address = value;
  return old;
}
