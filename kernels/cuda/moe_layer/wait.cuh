#pragma once

#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/memory.cuh"

// Every wait of the kernel. None is unbounded and none traps: who gives up says so once in the
// host's record, raises `gave_up` (CTA) and `stopped` (rank), and passes. From then on the CTA
// claims no tile and its waits for other CTAs pass at once, so that the kernel ends; its output
// means nothing.
namespace expertd::cuda::moe_layer {

__device__ __forceinline__ void mark(const MoeLayerParams& params, TimingMark which) {
  if constexpr (kRecordTiming) {
    if (params.timing) params.timing[blockIdx.x * kTimingMarks + which] = ptx::globaltimer_ns();
  }
}

__device__ __forceinline__ volatile uint32_t& gave_up_word() {
  return *static_cast<volatile uint32_t*>(&shared_state().gave_up);
}

// What a wait is for: the fields of the fault record.
struct Awaited {
  uint32_t code;
  uint32_t tile;
  int peer;
};

// First one wins the record; all of them end the CTA.
__device__ __forceinline__ void give_up(const MoeLayerParams& params, const Awaited& what,
                                        uint32_t found, uint32_t waited_us) {
  FaultRecord* fault = params.fault;
  if (atomicCAS_system(&fault->code, uint32_t{kNoFault}, what.code) == kNoFault) {
    fault->step = params.step;
    fault->cta = blockIdx.x;
    fault->tile = what.tile;
    fault->peer = static_cast<uint32_t>(what.peer);
    fault->found = found;
    fault->expected = params.step;
    fault->waited_us = waited_us;
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&fault->complete) = 1;
  }
  ptx::st_relaxed_gpu(&params.local.head->stopped, params.step);
  gave_up_word() = what.code;
}

// Looked at now and then by who waits for another CTA. True: stop waiting.
__device__ __forceinline__ bool should_give_up(const MoeLayerParams& params, const Awaited& what,
                                               uint32_t found, uint64_t since_ns) {
  if (gave_up_word() != kNoFault) return true;
  if (ptx::ld_relaxed_gpu(&params.local.head->stopped) == params.step) {
    gave_up_word() = what.code;
    return true;
  }
  const uint64_t waited = ptx::globaltimer_ns() - since_ns;
  const bool stop = ptx::ld_relaxed_sys(params.stop) != 0;
  if (!stop && waited < params.timeout_ns) return false;
  give_up(params, stop ? Awaited{kStopped, what.tile, what.peer} : what, found,
          static_cast<uint32_t>(waited / 1000));
  return true;
}

struct Waiter {
  const MoeLayerParams& params;

  __device__ __forceinline__ bool gave_up() const { return gave_up_word() != kNoFault; }

  // One warp polls words that others write until what `poll` returns (per lane: a word that is not
  // the step yet, or the step) is the step on all lanes. False: gave up.
  template <typename Poll>
  __device__ __forceinline__ bool poll_for_step(const Awaited& what, Poll poll) const {
    uint64_t since_ns = 0;
    for (uint32_t round = 1;; ++round) {
      const uint32_t found = poll();
      if (__all_sync(0xffffffffu, found == params.step)) return true;
      if (round % 64 != 0) continue;
      if (since_ns == 0) since_ns = ptx::globaltimer_ns();
      const bool mine = found != params.step && should_give_up(params, what, found, since_ns);
      if (__any_sync(0xffffffffu, mine)) return false;
    }
  }

  // Words of other CTAs; afterwards what those CTAs wrote before is visible to this warp.
  template <typename Poll>
  __device__ __forceinline__ void wait_for_ctas(uint32_t code, uint32_t tile, Poll poll) const {
    poll_for_step({code, tile, params.peers.rank}, poll);
    ptx::fence_acq_rel_gpu();
  }

  // Words that peers write here; likewise. `what` may differ from lane to lane.
  template <typename Poll>
  __device__ __forceinline__ bool wait_for_peer(const Awaited& what, Poll poll) const {
    const bool there = poll_for_step(what, poll);
    ptx::fence_acq_rel_sys();
    return there;
  }

  // A wait inside the CTA. Always met while the CTA's own warps run; the limit is for a defect.
  __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) const {
    if (ptx::mbarrier_try_wait(barrier, parity)) return;
    const uint64_t since_ns = ptx::globaltimer_ns();
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
      if (ptx::globaltimer_ns() - since_ns > 2 * params.timeout_ns) {
        gave_up_word() = kWaitPipeline;
        break;
      }
    }
  }
};

}  // namespace expertd::cuda::moe_layer
