#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// What this rank sends to its peers before they can compute: its ids, weights and row numbers
// whole, and each token's row once to every rank that has a route of it. Nobody is waited for.
//   send_routes   some warps of some CTAs, first of all
//   send_few      all warps, while the peers' ids are under way: steps of few tokens
//   TokenSender   one warp of each CTA beside its other work: steps of many tokens
namespace expertd::cuda::moe_layer {

// A fence at system scope waits until every store of the SM has been acknowledged, on a busy link
// tens of microseconds. Who has other work to do stores, does that, and fences so much later for
// each row of 14 KB that the stores are likely to have arrived.
inline constexpr uint64_t kSettleNs = 2000;
// Time may differ from lane to lane; the whole warp goes by lane 0's.
__device__ __forceinline__ bool has_settled(uint64_t at_ns) {
  return __shfl_sync(0xffffffffu, static_cast<int>(ptx::globaltimer_ns() >= at_ns), 0) != 0;
}

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
      uint4* to = reinterpret_cast<uint4*>(peer_tokens(params, params.peers.rank, peer) +
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

// CTA c sends token c, all its threads. slot_of(route, expert): global slot or -1.
template <typename SlotOf>
__device__ __forceinline__ void send_few(const MoeLayerParams& params, int warp, int lane,
                                         SlotOf slot_of) {
  const int token = static_cast<int>(blockIdx.x);
  if (is_long(params.num_tokens) || params.stall == kStallTokens) return;
  if (token >= params.num_tokens) return;
  uint32_t mine = 0;
  if (lane < params.top_k) {
    const int route = token * params.top_k + lane;
    const int slot = slot_of(route, params.ids[route]);
    if (slot >= 0) mine = 1u << (slot / params.slots_per_rank);
  }
  const uint32_t mask = __reduce_or_sync(0xffffffffu, mine) & ~(1u << params.peers.rank);
  send_row<2>(params, token, mask, warp * 32 + lane, kThreads);
  __syncthreads();
  if (warp != 0) return;
  ptx::fence_acq_rel_sys();
  flag_row(params, token, mask, lane);
}

// CTA c sends tokens c, c + grid, ..., a row at a time. Of a window of them the next is the one
// whose lowest slot on a peer is lowest: peers compute slot after slot, and so each slot's tokens
// are complete about when its turn comes.
struct TokenSender {
  static constexpr int kLaneTokens = 4;
  static constexpr int kWindow = 32 * kLaneTokens;
  static constexpr int kRowsAtOnce = 4;  // most rows between two fences; at most 4
  static constexpr uint32_t kSent = 0xffffffffu;

  const MoeLayerParams& params;
  int lane;
  bool done;
  int window = 0;          // index of its first token among the CTA's
  int batch = 1;           // rows before the next fence
  int num_stored = 0;      // of them, those that are stored
  uint32_t stored = 0;     // their indices in the window, a byte each
  bool all_taken = false;  // of the window
  uint64_t settled_at_ns = 0;
  uint32_t keys[kLaneTokens];
  uint32_t masks[kLaneTokens];

  __device__ __forceinline__ TokenSender(const MoeLayerParams& p, int l) : params(p), lane(l) {
    done =
        params.peers.num_ranks == 1 || !is_long(params.num_tokens) || params.stall == kStallTokens;
    if (!done) look_up();
  }

  __device__ __forceinline__ int token_at(int index) const {
    return static_cast<int>(blockIdx.x) + index * static_cast<int>(gridDim.x);
  }

  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      keys[i] = kSent;
      masks[i] = 0;
      const int token = token_at(window + i * 32 + lane);
      if (token >= params.num_tokens) continue;
#pragma unroll 2
      for (int k = 0; k < params.top_k; ++k) {
        const int expert = params.ids[token * params.top_k + k];
        if (expert < 0) continue;
        const int slot = placed_slot(params, expert, row_in_request(params, token));
        const int peer = slot / params.slots_per_rank;
        if (peer == params.peers.rank) continue;
        masks[i] |= 1u << peer;
        keys[i] = min(keys[i], static_cast<uint32_t>(slot - peer * params.slots_per_rank));
      }
    }
  }

  // Index in the window of the next token, or -1: none is left in it.
  __device__ __forceinline__ int take_next() {
    uint32_t best = kSent;  // slot << 8 | index
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if (keys[i] != kSent) best = min(best, keys[i] << 8 | (i * 32 + lane));
    }
    best = __reduce_min_sync(0xffffffffu, best);
    if (best == kSent) return -1;
    const int index = static_cast<int>(best & 0xffu);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if (index == i * 32 + lane) keys[i] = kSent;
    }
    return index;
  }

  __device__ __forceinline__ uint32_t mask_of(int index) const {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if (index / 32 == i) mask = masks[i];
    }
    return __shfl_sync(0xffffffffu, mask, index % 32);
  }

  // By the whole warp, unless it is done, between looks at what else there is to do: stores a row,
  // or flags a batch of them once it has had the time to arrive (kSettleNs), or does nothing.
  __device__ __forceinline__ void step() {
    if (num_stored < batch && !all_taken) {
      const int index = take_next();
      all_taken = index < 0;
      if (!all_taken) store(index);
      return;
    }
    if (num_stored > 0) {
      if (!has_settled(settled_at_ns)) return;
      flag();
    }
    if (all_taken) next_window();
  }

  __device__ __forceinline__ void store(int index) {
    send_row<7>(params, token_at(window + index), mask_of(index), lane, 32);
    stored |= static_cast<uint32_t>(index) << (8 * num_stored);
    ++num_stored;
    settled_at_ns = ptx::globaltimer_ns() + num_stored * kSettleNs;
  }

  __device__ __forceinline__ void flag() {
    __syncwarp();
    ptx::fence_acq_rel_sys();
#pragma unroll 1
    for (; num_stored > 0; --num_stored) {
      const int index = static_cast<int>(stored & 0xffu);
      flag_row(params, token_at(window + index), mask_of(index), lane);
      stored >>= 8;
    }
    batch = min(2 * batch, kRowsAtOnce);
  }

  __device__ __forceinline__ void next_window() {
    window += kWindow;
    all_taken = false;
    done = token_at(window) >= params.num_tokens;
    if (!done) look_up();
    if (done && lane == 0) mark(params, kMarkSent);
  }
};

}  // namespace expertd::cuda::moe_layer
