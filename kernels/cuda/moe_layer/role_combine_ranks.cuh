#pragma once

#include "kernels/cuda/moe_layer/combine_warp.cuh"
#include "kernels/cuda/moe_layer/cta_share.cuh"
#include "kernels/cuda/moe_layer/partial_records.cuh"

// The end of a step of several ranks, in two parts: the column blocks before the last, while the
// last tiles are being multiplied elsewhere, then the last one. In each a warp's items of the peers
// come first, which go out as records, then this rank's own. Nobody waits for what a peer sends
// before all that it owes itself of that part is on its way. Made for latency: one loop, since code
// is fetched when it is needed.
namespace expertd::cuda::moe_layer {

struct CombineRanksRole {
  static constexpr int kRowsAtOnce = 4;
  using Columns = PartialRow::Columns;
  using Slice = PartialRow::Slice;
  using TokenRoutes = PartialRow::TokenRoutes;
  using Sent = PartialRecords::Sent;

  CombineWarp common;
  PartialRecords records;
  int rank;

  __device__ __forceinline__ CombineRanksRole(const MoeLayerParams& params, int warp, int lane)
      : common(params, warp, lane), records(params, lane), rank(params.peers.rank) {}

  // Of column blocks begin .. end - 1. Each warp looks at its share of the flags; a barrier joins
  // them.
  __device__ __forceinline__ void wait_for_outputs(int begin, int end) const {
    const MoeLayerParams& params = common.params;
    const uint32_t step = params.step;
    const int row_tiles = params.hidden / 64;
    const int stride = params.local.fc2_done_stride;
    const int first = begin * kBlockQuads;
    const int quads = min(end * kBlockQuads, stride / 4) - first;
    const int count = static_cast<int>(tile_begin(params)[params.num_slots]) * quads;
    const uint32_t* flags = params.local.fc2_done + 4 * first;
    common.waiter.wait_for_ctas(kWaitFc2, blockIdx.x, [&] {
      uint32_t found = step;
#pragma unroll 1
      for (int i = common.warp * 32 + common.lane; i < count; i += kExpertWarps * 32) {
        const int tile = i / quads;
        const int quad = i - tile * quads;
        const uint4 words = ptx::ld_relaxed_gpu_v4(flags + tile * stride + 4 * quad);
        look_at_flags(words, row_tiles - 4 * (first + quad), step, found);  // the end is padded
      }
      return found;
    });
    ptx::barrier_sync_aligned<kCombineBarrier>(kCombiningThreads);
    if (common.warp == 0 && common.lane == 0) mark(params, kMarkOutputs);
  }

  __device__ __forceinline__ PartialRow::RouteWords look_up(const ItemWalk& at) const {
    if (!at.is_item()) return {};
    return common.row.load_routes(at.home, at.token());
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

  // total += this rank's own partial, rounded as if it had crossed.
  __device__ __forceinline__ void add_own(const PartialRow::Columns& sum,
                                          PartialRow::Columns& total) const {
    if (common.row.as_bf16) return PartialRow::add(total, PartialRow::pack(sum), 1.0f);
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] += sum[i];
  }

  // The ranks' partial rows in rank order: `own` is this rank's, `sent` a look at the first peer's.
  __device__ __forceinline__ void finish(uint32_t owners, const Slice& slice, int item,
                                         const Columns& own, Sent& sent) const {
    Columns total = {};
#pragma unroll 1
    for (; owners != 0; owners &= owners - 1) {
      const int owner = __ffs(owners) - 1;
      if (owner == rank) {
        add_own(own, total);
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

  __device__ __forceinline__ void process(const ItemWalk& at,
                                          const PartialRow::RouteWords& words) const {
    if (at.slice() >= at.slices()) return;
    const TokenRoutes routes = common.row.resolve(words);
    const bool is_own = at.is_own();
    const Slice slice = common.row.slice_of(at.token(), at.slice());
    const int item = at.token() * at.slices() + at.slice();
    Sent sent;
    if (is_own) look(routes.owners, slice, item, sent);
    Columns sum = {};
    common.row.add_up<kRowsAtOnce>(routes, slice, sum);
    if (is_own) {
      finish(routes.owners, slice, item, sum, sent);
    } else if (routes.here != 0) {
      records.store(records.records_of(rank, at.home, item), slice.inside, sum);
    }
  }

  // The CTA's items of a part of the work, a warp every kExpertWarps-th of them. First the column
  // blocks before the last: of the peers' what the announcing warp has left. Then the last, and
  // what has not been done before; it begins with the warp that would have had the first part's
  // next item.
  __device__ __forceinline__ void start(ItemWalk& at, int part) const {
    const int last = num_column_blocks(ItemWalk::slices()) - 1;
    const bool own_early = combines_own_early(common.params);
    const bool returns = common.params.stall != kStallPartials;
    if (part == 0) {
      const ReturnState& returned = shared_state().returned;
      const bool early = returns_early(common.params);
      at.peers_end = returns ? last : 0;
      at.own_begin = 0;
      at.own_end = own_early ? last : 0;
      const int block = early ? returned.block : 0;
      const int offset = early && block < last ? returned.offset : 0;
      at.start(block, early ? returned.distance : 1, offset + common.warp);
    } else {
      const int offset = at.offset;
      at.peers_end = returns ? last + 1 : 0;
      at.own_begin = own_early ? last : 0;
      at.own_end = last + 1;
      at.start(last, 1, offset);
    }
  }

  // What an item needs beside the outputs is looked up one item ahead.
  __device__ __forceinline__ void run() const {
    const int blocks = num_column_blocks(ItemWalk::slices());
    ItemWalk at;
    ptx::barrier_sync<kReturnedBarrier>(kReturningThreads);
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      start(at, part);
      PartialRow::RouteWords words = look_up(at);
      wait_for_outputs(part == 0 ? 0 : blocks - 1, part == 0 ? blocks - 1 : blocks);
#pragma unroll 1
      while (at.is_item() && !common.waiter.gave_up()) {
        ItemWalk next = at;
        next.advance(kExpertWarps);
        const PartialRow::RouteWords ahead = look_up(next);
        process(at, words);
        at = next;
        words = ahead;
      }
    }
  }
};

}  // namespace expertd::cuda::moe_layer
