#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// What this rank sends before anybody can compute: to its peers its routes, and each token's row
// once to every rank that has a route of it, itself included: token warps find all rows in one
// place. Nobody is waited for. CTA c sends tokens c, c + grid, ...
//   send_routes   some warps of some CTAs, first of all
//   send_first    warps from kFirstSendingWarp on: up to kRowsAtStart rows of the CTA, while the
//                 others wait for the peers' routes
//   flag_first    the last warp flags those while the first one makes the tables
//   TokenSender   the announcing warp, beside its other work: the rows of a CTA that has more
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

// The CTA's tokens in the order in which their rows go out, a window of them at a time: the next is
// the one whose lowest slot on a rank is lowest. Ranks compute slot after slot, and so each slot's
// tokens are complete about when its turn comes.
struct SendOrder {
  static constexpr uint16_t kNobody = 0xffff;  // key of a token without routes
  static constexpr uint32_t kEnd = 0xffffffffu;

  const MoeLayerParams& params;
  int first = 0;  // of the window, among the CTA's tokens

  __device__ __forceinline__ SendWindow& window() const { return shared_state().send; }
  __device__ __forceinline__ int token_at(int index) const {
    return static_cast<int>(blockIdx.x) + (first + index) * static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ bool is_empty() const { return token_at(0) >= params.num_tokens; }
  __device__ __forceinline__ int size() const {
    const int grid = static_cast<int>(gridDim.x);
    return min((params.num_tokens - token_at(0) + grid - 1) / grid, kSendWindow);
  }

  // By `count` threads, of which this is `thread`; a barrier has to follow. slot_of(route, expert):
  // global slot or -1.
  template <typename SlotOf>
  __device__ __forceinline__ void look_up(int thread, int count, SlotOf slot_of) const {
    const int tokens = size();
    for (int i = thread; i < tokens; i += count) {
      const int route = token_at(i) * params.top_k;
      uint32_t owners = 0;
      int key = kNobody;
#pragma unroll 4
      for (int k = 0; k < params.top_k; ++k) {
        const int slot = slot_of(route + k, params.ids[route + k]);
        if (slot < 0) continue;
        const int owner = static_cast<int>(params.by_slots_per_rank.Quotient(slot));
        owners |= 1u << owner;
        key = min(key, slot - owner * params.slots_per_rank);
      }
      window().keys[i] = static_cast<uint16_t>(key);
      window().owners[i] = owners;
    }
  }

  // By a warp: what comes behind `place`, or kEnd. Places begin behind 0.
  __device__ __forceinline__ uint32_t next(uint32_t place, int lane) const {
    const int tokens = size();
    uint32_t best = kEnd;
    for (int i = lane; i < tokens; i += 32) {
      const uint32_t key = window().keys[i];
      const uint32_t here = (key << 8 | i) + 1;
      if (key != kNobody && here > place) best = min(best, here);
    }
    return __reduce_min_sync(0xffffffffu, best);
  }
  __device__ __forceinline__ static int index_of(uint32_t place) { return (place - 1) & 0xffu; }
};
static_assert(kSendWindow <= 256 && kMaxSlots < SendOrder::kNobody);

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

// The CTA's rows behind the first kRowsAtStart, one at a time.
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
    done = order.token_at(kRowsAtStart) >= params.num_tokens || params.stall == kStallTokens ||
           Waiter{p}.gave_up();
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
    send_row<7>(params, order.token_at(index), order.window().owners[index], lane, 32);
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
    done = order.is_empty();
    if (done) {
      if (lane == 0) mark(params, kMarkSent);
      return;
    }
    __syncwarp();
    order.look_up(lane, 32, [&](int route, int expert) {
      if (expert < 0) return -1;
      return placed_slot(params, expert, row_in_request(params, route / params.top_k));
    });
    __syncwarp();
  }
};

}  // namespace expertd::cuda::moe_layer
