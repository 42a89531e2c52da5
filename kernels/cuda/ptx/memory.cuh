#pragma once

#include <cstdint>

// Global and shared memory accesses with an order, named like the instruction.
namespace expertd::cuda::ptx {

// Of the CTA, as the launch sized it.
__device__ __forceinline__ uint8_t* dynamic_shared_memory() {
  extern __shared__ __align__(1024) uint8_t bytes[];
  return bytes;
}

__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint4 ld_relaxed_gpu_v4(const uint32_t* address) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_relaxed_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// 16 bytes, aligned, as one: the memory model never shows a part of such an access. (The elements
// of a vector are accesses of their own.) But ptxas makes narrower loads of one of which only some
// words are used. (It does not of ld.mmio, which takes several times as long, a lane at a time.)
__device__ __forceinline__ uint4 ld_relaxed_sys_b128(const void* address) {
  uint64_t low, high;
  asm volatile(
      "{\n"
      ".reg .b128 value;\n"
      "ld.relaxed.sys.global.b128 value, [%2];\n"
      "mov.b128 {%0, %1}, value;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(address)
      : "memory");
  return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                    static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
}

__device__ __forceinline__ void st_relaxed_sys_b128(void* address, const uint4& value) {
  asm volatile(
      "{\n"
      ".reg .b128 value;\n"
      "mov.b128 value, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], value;\n"
      "}" ::"l"(address),
      "l"(uint64_t{value.y} << 32 | value.x), "l"(uint64_t{value.w} << 32 | value.z)
      : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_gpu(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// The value before.
__device__ __forceinline__ uint64_t atom_add_relaxed_gpu(uint64_t* address, uint64_t value) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ void fence_acq_rel_cta() {
  asm volatile("fence.acq_rel.cta;" ::: "memory");
}

__device__ __forceinline__ void fence_acq_rel_gpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

__device__ __forceinline__ uint2 ld_shared_v2(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}

__device__ __forceinline__ void st_shared_zero_v4(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ uint64_t globaltimer_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

}  // namespace expertd::cuda::ptx
