#pragma once

#include <cstdint>
#include <cstring>

#include "config/check.h"
#include "tests/kernels/cuda/simt/simt.h"

// Stands in for kernels/cuda/ptx/memory.cuh. Loads of words that others write let them run first.
namespace expertd::cuda::ptx {

inline uint8_t* dynamic_shared_memory() { return simt::dynamic_shared(); }

template <typename T>
T polled(const T* address) {
  simt::Yield();
  return *static_cast<const volatile T*>(address);
}

inline uint32_t ld_relaxed_gpu(const uint32_t* address) { return polled(address); }
inline uint4 ld_relaxed_gpu_v4(const uint32_t* address) {
  simt::Yield();
  uint4 value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}
inline uint32_t ld_relaxed_sys(const uint32_t* address) { return polled(address); }
inline uint32_t ld_acquire_sys(const uint32_t* address) { return polled(address); }
// Arrives when it likes, and behind what was stored after it: whoever orders nothing gets that.
inline void st_relaxed_sys_b128(void* address, const uint4& value) {
  EXPERTD_CHECK(reinterpret_cast<uintptr_t>(address) % 16 == 0);
  simt::Later([=] { std::memcpy(address, &value, sizeof(value)); });
}
inline uint4 ld_relaxed_sys_b128(const void* address) {
  EXPERTD_CHECK(reinterpret_cast<uintptr_t>(address) % 16 == 0);
  simt::Yield();
  uint4 value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}
inline void st_relaxed_gpu(uint32_t* address, uint32_t value) { *address = value; }
inline void st_relaxed_sys(uint32_t* address, uint32_t value) { *address = value; }
inline uint64_t atom_add_relaxed_gpu(uint64_t* address, uint64_t value) {
  const uint64_t before = *address;
  *address += value;
  return before;
}
inline void fence_acq_rel_cta() {}
inline void fence_acq_rel_gpu() {}
inline void fence_acq_rel_sys() {}

inline uint4 ld_shared_v4(uint32_t address) {
  uint4 value;
  std::memcpy(&value, dynamic_shared_memory() + address, sizeof(value));
  return value;
}
inline uint2 ld_shared_v2(uint32_t address) {
  uint2 value;
  std::memcpy(&value, dynamic_shared_memory() + address, sizeof(value));
  return value;
}

inline void st_shared_zero_v4(uint32_t address) {
  std::memset(dynamic_shared_memory() + address, 0, 16);
}

// Who looks at the clock waits for something.
inline uint64_t globaltimer_ns() {
  simt::Yield();
  return simt::time_ns();
}

}  // namespace expertd::cuda::ptx
