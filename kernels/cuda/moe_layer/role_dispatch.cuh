#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/send_order.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// What this rank sends before anybody can compute: to its peers its routes, and each token's row
// once to every rank that has a route of it, itself included: token warps find all rows in one
// place. Nobody is waited for. CTA c sends tokens c, c + grid, ...
//   send_routes   some warps of some CTAs, first of all
//   send_first    warps from kFirstSendingWarp on: up to kRowsAtStart rows of the CTA, while the
//                 others wait for the peers' routes
//   flag_first    the last warp flags those while the first one makes the tables
//   TokenSender   (token_sender.cuh) the announcing warp, beside its other work: what a CTA has
//   more
namespace expertd::cuda::moe_layer {

// A record a route, and one in front that says how many there are. Each is one store and carries
// its step, so that they may arrive in any order and nothing is fenced. The last CTAs send first:
// the first ones have tokens to send. A thread has one route, unless there are very many.
__device__ __forceinline__ void send_routes(const MoeLayerParams& params, int thread) {
  constexpr int kFewThreads = 128;  // of a CTA, as long as that is enough
  const int rank = params.peers.rank;
  const int cta = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  if (params.stall == kStallRoutes) return;
  const int header_to = kThreads - 1 - thread;
  if (cta == 0 && header_to < params.peers.num_ranks && header_to != rank) {
    store_record(route_records(params, rank, header_to),
                 layout::RouteHeader(params.step, params.num_tokens, params.top_k));
  }
  if (params.stall == kStallRecords) return;
  const int routes = params.num_tokens * params.top_k;
  const int ctas = static_cast<int>(gridDim.x);
  const int threads = routes <= kFewThreads * ctas ? kFewThreads : kThreads;
  if (thread >= threads) return;
#pragma unroll 1
  for (int route = cta * threads + thread; route < routes; route += ctas * threads) {
    const layout::RouteRecord record = {
        params.ids[route], params.weights[route],
        row_in_request(params, static_cast<int>(params.by_top_k.Quotient(route))), params.step};
#pragma unroll 1
    for (int peer = 0; peer < params.peers.num_ranks; ++peer) {
      if (peer != rank) store_record(route_records(params, rank, peer) + 1 + route, record);
    }
  }
}

// Copies a token's row to every rank in `mask`, by `count` threads of which this is `thread`.
template <int kAtOnce>
__device__ __forceinline__ void send_row(const MoeLayerParams& params, int token, uint32_t mask,
                                         int thread, int count) {
  if (mask == 0) return;
  const int chunks = params.hidden / 8;  // of 16 bytes
  const uint4* row = reinterpret_cast<const uint4*>(params.x + int64_t{token} * params.hidden);
#pragma unroll 1
  for (int base = thread; base < chunks; base += kAtOnce * count) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i * count < chunks) values[i] = __ldcg(row + base + i * count);
    }
#pragma unroll 1
    for (uint32_t left = mask; left != 0; left &= left - 1) {
      const int peer = __ffs(left) - 1;
      uint4* to = reinterpret_cast<uint4*>(token_rows(params, params.peers.rank, peer) +
                                           int64_t{token} * params.hidden);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i * count < chunks) to[base + i * count] = values[i];
      }
    }
  }
}

// By lane `peer` of a warp that has seen all stores of the row and has fenced.
__device__ __forceinline__ void flag_row(const MoeLayerParams& params, int token, uint32_t mask,
                                         int peer) {
  if (mask >> peer & 1u) {
    ptx::st_relaxed_sys(token_flags(params, params.peers.rank, peer) + token, params.step);
  }
}

// Rows that go out at the start.
inline constexpr int kRowsAtStart = 4;

// By warps from kFirstSendingWarp on, `thread` counted from there.
template <typename SlotOf>
__device__ __forceinline__ void send_first(const MoeLayerParams& params, int thread,
                                           SlotOf slot_of) {
  const SendOrder order{params};
  if (order.is_empty() || params.stall == kStallTokens) return;
  order.look_up(thread, kSendingThreads, slot_of);
  ptx::barrier_sync<kSendBarrier>(kSendingThreads);
  uint32_t place = 0;
  for (int i = 0; i < kRowsAtStart; ++i) {
    place = order.next(place, thread % 32);
    if (place == SendOrder::kEnd) break;
    const int index = SendOrder::index_of(place);
    send_row<2>(params, order.token_at(index), order.window().owners[index], thread,
                kSendingThreads);
  }
}

// By one warp, a barrier and some microseconds later, when the fence has little to wait for. A CTA
// that has given up waiting for routes flags nothing: a peer's wait for these rows would only be
// met in time to begin another.
__device__ __forceinline__ void flag_first(const MoeLayerParams& params, int lane) {
  const SendOrder order{params};
  if (order.is_empty() || params.stall == kStallTokens || Waiter{params}.gave_up()) return;
  ptx::fence_acq_rel_sys();
  uint32_t place = 0;
#pragma unroll 1
  for (int i = 0; i < kRowsAtStart; ++i) {
    place = order.next(place, lane);
    if (place == SendOrder::kEnd) break;
    const int index = SendOrder::index_of(place);
    flag_row(params, order.token_at(index), order.window().owners[index], lane);
  }
}

}  // namespace expertd::cuda::moe_layer
