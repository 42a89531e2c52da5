#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/role_dispatch.cuh"
#include "kernels/cuda/moe_layer/route_lookup.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

namespace expertd::cuda::moe_layer {

// Routing before the sort: whose tokens there are in the step, and the slots of an own sort's
// routes.
struct RouteSources : RouteLookup {
  using RouteLookup::RouteLookup;

  // Whose tokens there are: until every peer has said so. Nothing comes from a rank that was given
  // up. Ends with a barrier.
  __device__ __forceinline__ void find_sources(int warp, int lane) const {
    if (warp == 1) {
      const int rank = params.peers.rank;
      const bool peer = lane < params.peers.num_ranks && lane != rank;
      layout::RouteRecord header = layout::RouteHeader(params.step, 0, 1);
      if (lane == rank) header = layout::RouteHeader(params.step, params.num_tokens, params.top_k);
      (void)Waiter{params}.wait_for_peer({kWaitRoutes, 0, lane}, [&] {
        if (peer) header = load_route(route_records(params, lane, rank));
        return header.step;
      });
      if (header.step != params.step) header = layout::RouteHeader(params.step, 0, 1);
      uint32_t sum = static_cast<uint32_t>(layout::TokensOf(header) * layout::TopKOf(header));
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
      }
      if (lane < params.peers.num_ranks) {
        sources().num_tokens[lane] = layout::TokensOf(header);
        sources().top_k[lane] = static_cast<int16_t>(layout::TopKOf(header));
        sources().first_route[lane + 1] = sum;
      }
      if (lane == 0) sources().first_route[0] = 0;
    }
    sync_routing();
  }

  // Several ranks, up to the sort: the routes that go to the peers, the table, and what comes from
  // them. For an own sort all routes are looked up as well; a barrier has to follow.
  __device__ __forceinline__ void exchange(int warp, int lane) const {
    const int thread = warp * 32 + lane;
    send_routes(params, thread);
    fill_table(thread);
    find_sources(warp, lane);
    if (num_routes() <= params.own_sort_routes) fill_cache<3>({0, num_routes()}, warp, lane);
  }

  // One rank, likewise. The experts of the first routes are loaded while the table is.
  __device__ __forceinline__ void look_around(int thread) const {
    constexpr int kAhead = 3;
    const int routes = params.num_tokens * params.top_k;
    int experts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int route = thread + i * kRoutingThreads;
      experts[i] = route < routes ? params.ids[route] : -1;
    }
    fill_table(thread);
    if (thread == 0) {
      sources().num_tokens[0] = params.num_tokens;
      sources().top_k[0] = static_cast<int16_t>(params.top_k);
      sources().first_route[0] = 0;
      sources().first_route[1] = static_cast<uint32_t>(routes);
    }
    sync_routing();
    if (routes > params.own_sort_routes) return;
    bool again = false;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int route = thread + i * kRoutingThreads;
      if (route < routes) again |= keep(route, experts[i]);
    }
#pragma unroll 1
    for (int route = thread + kAhead * kRoutingThreads; route < routes; route += kRoutingThreads) {
      again |= keep(route, params.ids[route]);
    }
    if (again) look_again({0, routes}, thread);
  }
};

}  // namespace expertd::cuda::moe_layer
