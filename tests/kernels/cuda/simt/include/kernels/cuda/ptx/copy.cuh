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

inline void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  bulk_copy(destination, source, bytes, barrier, 0);
}
// Changes nothing, but what it names must be there.
inline void bulk_prefetch(const void* source, uint32_t bytes) {
  EXPERTD_CHECK(bytes % 16 == 0 && bytes > 0 && reinterpret_cast<uintptr_t>(source) % 16 == 0);
  const volatile uint8_t* const from = static_cast<const uint8_t*>(source);
  (void)from[0];
  (void)from[bytes - 1];
}

inline void cp_async_16(uint32_t destination, const void* source) {
  uint8_t* const to = simt::dynamic_shared() + destination;
  simt::AddCopy([=] { std::memcpy(to, source, 16); });
}
inline void cp_async_commit() { simt::CommitCopies(); }
template <int kPending>
void cp_async_wait() {
  simt::FinishCopies(kPending);
}
inline void fence_proxy_async_shared() {}
inline void fence_proxy_async_global() {}

}  // namespace expertd::cuda::ptx
