#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cuda/ptx/mbarrier.cuh"

// Stands in for kernels/cuda/ptx/copy.cuh.
namespace expertd::cuda::ptx {

inline uint64_t policy_evict_first() { return 0; }

inline void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                      uint64_t) {
  EXPERTD_CHECK(bytes % 16 == 0 && destination % 16 == 0 &&
                reinterpret_cast<uintptr_t>(source) % 16 == 0);
  uint8_t* const shared = simt::dynamic_shared();
  simt::Later([=] {
    std::memcpy(shared + destination, source, bytes);
    EmulatedBarrier& state = barrier_at(shared, barrier);
    state.bytes -= static_cast<int32_t>(bytes);
    complete_if_due(state);
  });
}

inline void cp_async_16(uint32_t destination, const void* source, uint32_t source_bytes) {
  uint8_t* const to = simt::dynamic_shared() + destination;
  simt::AddCopy([=] {
    std::memset(to, 0, 16);
    if (source_bytes > 0) std::memcpy(to, source, source_bytes);
  });
}
inline void cp_async_wait_all() { simt::FinishCopies(); }
inline void fence_proxy_async_shared() {}

}  // namespace expertd::cuda::ptx
