#pragma once

#include <cstdint>

#include "config/check.h"
#include "tests/kernels/cuda/simt/simt.h"

// Stands in for kernels/cuda/ptx/mbarrier.cuh.
namespace expertd::cuda::ptx {

// What the 8 bytes hold here.
struct EmulatedBarrier {
  uint16_t count;    // arrivals of a phase
  uint16_t pending;  // of the current one
  uint32_t parity : 1;
  int32_t bytes : 31;  // expected and not there
};
static_assert(sizeof(EmulatedBarrier) == 8);

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - simt::dynamic_shared());
}
inline EmulatedBarrier& barrier_at(uint8_t* shared, uint32_t barrier) {
  return *reinterpret_cast<EmulatedBarrier*>(shared + barrier);
}
inline void complete_if_due(EmulatedBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.parity ^= 1u;
  barrier.pending = barrier.count;
}

inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  const auto n = static_cast<uint16_t>(count);
  barrier_at(simt::dynamic_shared(), barrier) = {n, n, 0, 0};
}
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  EmulatedBarrier& state = barrier_at(simt::dynamic_shared(), barrier);
  EXPERTD_CHECK(state.pending > 0);
  state.bytes += static_cast<int32_t>(bytes);
  --state.pending;
  complete_if_due(state);
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect_tx(barrier, 0); }

struct AwaitedPhase {
  const EmulatedBarrier* barrier;
  uint32_t parity;
};
inline bool phase_is_over(const void* context) {
  const auto* awaited = static_cast<const AwaitedPhase*>(context);
  return awaited->barrier->parity != awaited->parity;
}

inline bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  simt::Yield();
  return barrier_at(simt::dynamic_shared(), barrier).parity != parity;
}
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  const AwaitedPhase awaited = {&barrier_at(simt::dynamic_shared(), barrier), parity};
  return simt::Block(&phase_is_over, &awaited, 100'000);
}

}  // namespace expertd::cuda::ptx
