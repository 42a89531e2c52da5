#pragma once

#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/memory.cuh"
#include "kernels/cuda/ptx/warp.cuh"

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

// Who waits for this rank's own CTAs speaks later than who waits for a peer: the CTAs may wait for
// that peer themselves, and the record should name the cause.
__device__ __forceinline__ uint64_t limit_of(const MoeLayerParams& params, int peer) {
  return peer == params.peers.rank ? params.timeout_ns + params.timeout_ns / 4 : params.timeout_ns;
}

// Looked at now and then by who waits for another CTA or a peer. True: stop waiting. The host's
// word is read across the bus: by few at a time (`ask_host`).
__device__ __forceinline__ bool should_give_up(const MoeLayerParams& params, const Awaited& what,
                                               uint32_t found, uint64_t waited_ns, bool ask_host) {
  if (gave_up_word() != kNoFault) return true;
  if (ptx::ld_relaxed_gpu(&params.local.head->stopped) == params.step) {
    gave_up_word() = what.code;
    return true;
  }
  const bool stop = ask_host && ptx::ld_relaxed_sys(params.stop) != 0;
  if (!stop && waited_ns < limit_of(params, what.peer)) return false;
  give_up(params, stop ? Awaited{kStopped, what.tile, what.peer} : what, found,
          static_cast<uint32_t>(waited_ns / 1000));
  return true;
}

// Of four flags the first `there`: one that is not the step yet goes to `found`.
__device__ __forceinline__ void look_at_flags(const uint4& flags, int there, uint32_t step,
                                              uint32_t& found) {
  if (flags.x != step) found = flags.x;
  if (there > 1 && flags.y != step) found = flags.y;
  if (there > 2 && flags.z != step) found = flags.z;
  if (there > 3 && flags.w != step) found = flags.w;
}

struct Waiter {
  static constexpr uint32_t kRounds = 64;  // polls between two looks at the clock
  static constexpr uint64_t kAskHostNs = 1 << 20;
  static constexpr uint32_t kAskingCtas = 16;  // one CTA of so many asks when it looks first

  const MoeLayerParams& params;

  __device__ __forceinline__ bool gave_up() const { return gave_up_word() != kNoFault; }

  // One warp polls words that others write until what `poll` returns (per lane: a word that is not
  // the step yet, or the step) is the step on all lanes. False: gave up.
  template <typename Poll>
  __device__ __forceinline__ bool poll_for_step(const Awaited& what, Poll poll) const {
    return poll_for(params.step, what, poll);
  }
  template <typename Poll>
  __device__ __forceinline__ bool poll_for(uint32_t step, const Awaited& what, Poll poll) const {
    uint64_t since_ns = 0, ask_at_ns = 0;
    for (uint32_t round = 1;; ++round) {
      const uint32_t found = poll();
      const uint32_t missing = __ballot_sync(0xffffffffu, found != step);
      if (missing == 0) return true;
      if (round % kRounds != 0) continue;
      const uint64_t now_ns = ptx::globaltimer_ns();
      if (since_ns == 0) {
        since_ns = now_ns;
        ask_at_ns = blockIdx.x % kAskingCtas == 0 ? now_ns : now_ns + kAskHostNs;
      }
      const bool ask = now_ns >= ask_at_ns;
      if (ask) ask_at_ns = now_ns + kAskHostNs;
      const bool mine = ptx::lane_id() == __ffs(missing) - 1 &&
                        should_give_up(params, what, found, now_ns - since_ns, ask);
      if (__any_sync(0xffffffffu, mine)) return false;
    }
  }

  // Words of other CTAs; afterwards what those CTAs wrote before is visible to this warp.
  template <typename Poll>
  __device__ __forceinline__ void wait_for_ctas(uint32_t code, uint32_t tile, Poll poll) const {
    poll_for_step({code, tile, params.peers.rank}, poll);
    ptx::fence_acq_rel_gpu();
  }

  // Words that peers write here; `poll` reads them with ld_acquire_sys, so that what the peers
  // wrote before is visible to the lane that read. A fence instead would wait for all stores of the
  // warp, remote ones too. `what` may differ from lane to lane.
  template <typename Poll>
  __device__ __forceinline__ bool wait_for_peer(const Awaited& what, Poll poll) const {
    const bool there = poll_for_step(what, poll);
    __syncwarp();
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

// A fence at system scope waits until every store of the SM has been acknowledged, on a busy link
// tens of microseconds. Who has other work to do stores, does that, and fences so much later for
// each row of 14 KB that the stores are likely to have arrived.
inline constexpr uint64_t kSettleNs = 2000;
// Time may differ from lane to lane; the whole warp goes by lane 0's.
__device__ __forceinline__ bool has_settled(uint64_t at_ns) {
  return __shfl_sync(0xffffffffu, static_cast<int>(ptx::globaltimer_ns() >= at_ns), 0) != 0;
}

}  // namespace expertd::cuda::moe_layer
