#pragma once

#include "kernels/cuda/moe_layer/combine_warp.cuh"
#include "kernels/cuda/moe_layer/partial_records.cuh"

// The end of a step for the ranks that have few tokens in it (not has_many_tokens): a warp's items
// of the peers first, which go out as records, then this rank's own. Made for latency: one loop,
// since code is fetched when it is needed; no parameter is loaded behind the wait for the outputs,
// whose fence empties L1 (the caller has copied them); and nobody meets anybody.
namespace expertd::cuda::moe_layer {

struct CombineFewRole {
  static constexpr int kRowsAtOnce = 4;
  using Columns = PartialRow::Columns;
  using Slice = PartialRow::Slice;
  using TokenRoutes = PartialRow::TokenRoutes;
  using Sent = PartialRecords::Sent;

  CombineWarp common;
  PartialRecords records;
  int rank;
  int num_ranks;
  int slices;
  bool returns;  // what peers wait for

  __device__ __forceinline__ CombineFewRole(const MoeLayerParams& params,
                                            const MoeLayerParams& near, int warp, int lane)
      : common(params, near, warp, lane),
        records(params, lane),
        rank(params.peers.rank),
        num_ranks(params.peers.num_ranks),
        slices(layout::NumPartialSlices(params.hidden)),
        returns(params.stall != kStallPartials) {}

  // The warp's items in order: those of the next rank's tokens, of the one after it, ..., this
  // rank's.
  struct Cursor {
    int distance = 0;  // of the rank, 1 .. num_ranks; more: no item is left
    int home = 0;
    int token = 0;
    int index = 0;  // of the slice
    int left = 0;   // items of this rank's, this one included
  };
  __device__ __forceinline__ bool is_item(const Cursor& at) const {
    return at.distance <= num_ranks;
  }
  __device__ __forceinline__ void advance(Cursor& at) const {
    --at.left;
    if (++at.index == slices) {
      at.index = 0;
      ++at.token;
    }
#pragma unroll 1
    while (at.left <= 0 && ++at.distance <= num_ranks) {
      at.home =
          rank + at.distance < num_ranks ? rank + at.distance : rank + at.distance - num_ranks;
      const int num_tokens = shared_state().sources.num_tokens[at.home];
      if (has_many_tokens(num_tokens) || (at.home != rank && !returns)) continue;
      const Block items = share_of(num_tokens * slices);
      const CombineWarp::Run run = common.warp_run({items.first, items.first + items.count});
      at.left = run.end - run.begin;
      at.token = run.begin / slices;
      at.index = run.begin - at.token * slices;
    }
  }
  __device__ __forceinline__ PartialRow::RouteWords look_up(const Cursor& at) const {
    if (!is_item(at)) return {};
    return common.row.load_routes(at.home, at.token);
  }

  // Waits for what `owner` sent; `sent` is the first look at it.
  __device__ __forceinline__ void wait_for(int owner, const Slice& slice, int item,
                                           Sent& sent) const {
    const Awaited what = {kWaitPartials, static_cast<uint32_t>(slice.token), owner};
    common.waiter.poll_for(records.step, what, [&] {
      const uint32_t found = records.found(slice, sent);
      if (found != records.step) records.load(owner, slice, item, sent);
      return found;
    });
  }

  // A first look at what the first peer of `owners` sent.
  __device__ __forceinline__ void look(uint32_t owners, const Slice& slice, int item,
                                       Sent& sent) const {
    const uint32_t peers = owners & ~(1u << rank);
    if (peers != 0) records.load(__ffs(peers) - 1, slice, item, sent);
  }

  // The ranks' partial rows in rank order: `own` is this rank's, `sent` a look at the first peer's.
  __device__ __forceinline__ void finish(uint32_t owners, const Slice& slice, int item,
                                         const Columns& own, Sent& sent) const {
    Columns total = {};
#pragma unroll 1
    for (; owners != 0; owners &= owners - 1) {
      const int owner = __ffs(owners) - 1;
      if (owner == rank) {
        common.add_own(own, total);
        continue;
      }
      Sent ahead;
      look(owners & (owners - 1), slice, item, ahead);
      wait_for(owner, slice, item, sent);
      records.add(slice, sent, total);
      sent = ahead;
    }
    if (slice.inside) common.store(total, slice.element + common.lane * 8);
  }

  __device__ __forceinline__ void process(const Cursor& at,
                                          const PartialRow::RouteWords& words) const {
    const TokenRoutes routes = common.row.resolve(words);
    const bool is_own = at.home == rank;
    const Slice slice = common.row.slice_of(at.token, at.index);
    const int item = at.token * slices + at.index;
    Sent sent;
    if (is_own) look(routes.owners, slice, item, sent);
    Columns sum = {};
    common.row.add_up<kRowsAtOnce>(routes, slice, sum);
    if (is_own) {
      finish(routes.owners, slice, item, sum, sent);
    } else if (routes.here != 0) {
      records.store(at.home, slice, item, sum);
    }
  }

  // What an item needs beside the outputs is looked up one item ahead.
  __device__ __forceinline__ void run(bool outputs_are_there) const {
    Cursor at;
    PartialRow::RouteWords words;
    bool first = true;
#pragma unroll 1
    do {
      Cursor next = at;
      advance(next);
      const PartialRow::RouteWords ahead = look_up(next);
      if (!first) {
        process(at, words);
      } else if (!outputs_are_there) {
        common.wait_for_outputs();
      }
      first = false;
      at = next;
      words = ahead;
    } while (is_item(at) && !common.waiter.gave_up());
  }
};

}  // namespace expertd::cuda::moe_layer
