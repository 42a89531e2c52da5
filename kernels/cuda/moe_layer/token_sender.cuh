#pragma once

#include "kernels/cuda/moe_layer/role_dispatch.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

namespace expertd::cuda::moe_layer {

// By the announcing warp: the CTA's rows behind the first kRowsAtStart, one at a time. A CTA that
// has given up waiting for routes sends none of them.
struct TokenSender {
  static constexpr int kRowsAtOnce = 4;  // most rows between two fences; at most 4

  const MoeLayerParams& params;
  int lane;
  bool done;
  SendOrder order;
  uint32_t place = 0;      // of the last row that was stored
  int batch = 1;           // rows before the next fence
  int num_stored = 0;      // of them, those that are stored
  uint32_t stored = 0;     // their indices in the window, a byte each
  bool all_taken = false;  // of the window
  uint64_t settled_at_ns = 0;

  __device__ __forceinline__ TokenSender(const MoeLayerParams& p, int l)
      : params(p), lane(l), order{p} {
    done = !order.has(kRowsAtStart) || params.stall == kStallTokens || Waiter{p}.gave_up();
    for (int i = 0; i < kRowsAtStart && !done; ++i) place = order.next(place, lane);
  }

  // False: none is left in the window.
  __device__ __forceinline__ bool take_next() {
    const uint32_t next = order.next(place, lane);
    all_taken = next == SendOrder::kEnd;
    if (all_taken) return false;
    place = next;
    stored |= static_cast<uint32_t>(SendOrder::index_of(next)) << (8 * num_stored);
    ++num_stored;
    return true;
  }

  // By the whole warp, unless it is done, between looks at what else there is to do: stores a row,
  // or flags a batch of them once it has had the time to arrive (kSettleNs), or does nothing.
  __device__ __forceinline__ void step() {
    if (num_stored < batch && !all_taken) {
      if (take_next()) store(SendOrder::index_of(place));
      return;
    }
    if (num_stored > 0) {
      if (!has_settled(settled_at_ns)) return;
      flag();
    }
    if (all_taken) next_window();
  }

  __device__ __forceinline__ void store(int index) {
    TokenRow<7>{params, order.token_at(index), lane}.send(order.window().owners[index], false);
    settled_at_ns = ptx::globaltimer_ns() + num_stored * kSettleNs;
  }

  __device__ __forceinline__ void flag() {
    __syncwarp();
    ptx::fence_acq_rel_sys();
#pragma unroll 1
    for (; num_stored > 0; --num_stored) {
      const int index = static_cast<int>(stored & 0xffu);
      flag_row(params, order.token_at(index), order.window().owners[index], lane);
      stored >>= 8;
    }
    batch = min(2 * batch, kRowsAtOnce);
  }

  __device__ __forceinline__ void next_window() {
    order.first += kSendWindow;
    place = 0;
    all_taken = false;
    done = !order.has(0);
    if (done) {
      if (lane == 0) mark(params, kMarkSent);
      return;
    }
    __syncwarp();
    order.look_up(lane);
  }
};

}  // namespace expertd::cuda::moe_layer
