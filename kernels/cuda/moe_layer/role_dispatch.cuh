#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/send_order.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"

// What this rank sends before anybody can compute: to its peers its routes, and each token's row
// once to every rank that has a route of it, itself included: token warps find all rows in one
// place. Nobody is waited for. CTA c sends tokens c, c + grid, ...
//   send_routes       some warps of some CTAs, first of all
//   send_first_rows   the announcing warp, while the others route: up to kRowsAtStart rows
//   TokenSender       (token_sender.cuh) the same warp, beside its other work: what a CTA has more
namespace expertd::cuda::moe_layer {

// A record a route, and one in front that says how many there are. Each is one store and carries
// its step, so that they may arrive in any order and nothing is fenced. The last CTAs send first:
// the first ones have tokens to send. A thread has one route, unless there are very many.
__device__ __forceinline__ void send_routes(const MoeLayerParams& params, int thread) {
  constexpr int kFewThreads = 128;  // of a CTA, as long as that is enough
  const int rank = params.peers.rank;
  const int cta = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  if (params.stall == kStallRoutes) return;
  const int header_to = kRoutingThreads - 1 - thread;
  if (cta == 0 && header_to < params.peers.num_ranks && header_to != rank) {
    store_route(route_records(params, rank, header_to),
                layout::RouteHeader(params.step, params.num_tokens, params.top_k));
  }
  if (params.stall == kStallRecords) return;
  const int routes = params.num_tokens * params.top_k;
  const int ctas = static_cast<int>(gridDim.x);
  const int threads = routes <= kFewThreads * ctas ? kFewThreads : kRoutingThreads;
  if (thread >= threads) return;
#pragma unroll 1
  for (int route = cta * threads + thread; route < routes; route += ctas * threads) {
    const layout::RouteRecord record = {
        params.ids[route], params.weights[route],
        row_in_request(params, static_cast<int>(params.by_top_k.Quotient(route))), params.step};
#pragma unroll 1
    for (int peer = 0; peer < params.peers.num_ranks; ++peer) {
      if (peer != rank) store_route(route_records(params, rank, peer) + 1 + route, record);
    }
  }
}

// A token's row, copied by a warp to every rank in a mask, kAtOnce chunks of 16 bytes a lane at a
// time.
template <int kAtOnce>
struct TokenRow {
  const MoeLayerParams& params;
  int token;
  int chunk;  // the first that is not sent; at first the lane
  uint4 values[kAtOnce];

  __device__ __forceinline__ void load() {
    const int left = params.hidden / 8 - chunk;
    const int64_t first = int64_t{token} * params.hidden + chunk * 8;
    const uint4* from = reinterpret_cast<const uint4*>(params.x + first);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i * 32 < left) values[i] = __ldcg(from + i * 32);
    }
  }
  // What is left; `loaded`: load() has been called.
  __device__ __forceinline__ void send(uint32_t mask, bool loaded) {
    const int chunks = params.hidden / 8;
    const int64_t row = token_row_offset(params, params.peers.rank, token);
#pragma unroll 1
    for (; chunk < chunks; chunk += 32 * kAtOnce, loaded = false) {
      if (!loaded) load();
#pragma unroll 1
      for (uint32_t left = mask; left != 0; left &= left - 1) {
        uint4* to = params.peers.at<uint4>(__ffs(left) - 1, row + chunk * 16);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i * 32 < chunks - chunk) to[i * 32] = values[i];
        }
      }
    }
  }
};

// By lane `peer` of a warp that has seen all stores of the row and has fenced.
__device__ __forceinline__ void flag_row(const MoeLayerParams& params, int token, uint32_t mask,
                                         int peer) {
  if (mask >> peer & 1u) {
    ptx::st_relaxed_sys(token_flags(params, params.peers.rank, peer) + token, params.step);
  }
}

// Rows that go out at the start.
inline constexpr int kRowsAtStart = 4;

// By the announcing warp, at the kernel's start: whether the CTA will give up waiting for routes is
// not known yet. Each row is flagged behind a fence of its own: the warp has nothing else to do.
__device__ __forceinline__ void send_first_rows(const MoeLayerParams& params, int lane) {
  const SendOrder order{params};
  if (!order.has(0) || params.stall == kStallTokens) return;
  // While slots are looked up, and with them the rows' order: the first token's row, the only one
  // if the rank has few tokens, is loaded as far as there are registers, and rows come to L2.
  TokenRow<10> row{params, order.token_at(0), lane};
  row.load();
  if (lane < kRowsAtStart && order.has(lane)) {
    ptx::bulk_prefetch(params.x + int64_t{order.token_at(lane)} * params.hidden, params.hidden * 2);
  }
  order.look_up(lane);
  uint32_t place = 0;
#pragma unroll 1
  for (int i = 0; i < kRowsAtStart; ++i) {
    place = order.next(place, lane);
    if (place == SendOrder::kEnd) break;
    const int index = SendOrder::index_of(place);
    const uint32_t owners = order.window().owners[index];
    const bool loaded = i == 0 && index == 0;
    if (!loaded) {
      row.token = order.token_at(index);
      row.chunk = lane;
    }
    row.send(owners, loaded);
    __syncwarp();
    ptx::fence_acq_rel_sys();
    flag_row(params, row.token, owners, lane);
  }
  if (lane == 0) mark(params, kMarkSent);
}

// One rank: this CTA's share of x to L2, if it is small: the first tiles gather from it.
__device__ __forceinline__ void prefetch_tokens(const MoeLayerParams& params) {
  if (params.x_share == 0) return;
  const int begin = params.x_share * static_cast<int>(blockIdx.x);
  const int left = min(params.num_tokens * params.hidden * 2 - begin, params.x_share);
  if (left > 0) ptx::bulk_prefetch(reinterpret_cast<const char*>(params.x) + begin, left);
}

// What the announcing warp does while the others route.
__device__ __forceinline__ void begin_tokens(const MoeLayerParams& params, int lane) {
  if (params.peers.num_ranks > 1) {
    send_first_rows(params, lane);
  } else if (lane == 0) {
    prefetch_tokens(params);
  }
}

}  // namespace expertd::cuda::moe_layer
