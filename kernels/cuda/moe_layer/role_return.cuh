#pragma once

#include "kernels/cuda/moe_layer/cta_share.cuh"
#include "kernels/cuda/moe_layer/partial_records.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// Partial rows of the peers' tokens go back while FC2 still runs: it goes by column block, and when
// the slots have all done one, the announcing warp of each CTA returns those columns of the CTA's
// items. The last block, and what is left when the list of tiles ends, is combine's.
namespace expertd::cuda::moe_layer {

struct PartialSender {
  static constexpr int kRoutesAtOnce = 2;

  const MoeLayerParams& params;
  Waiter waiter;
  int lane;
  ItemWalk walk;
  int found = 0;              // flags of the walk's block that have been seen, in fours
  int complete = 0;           // column blocks that are complete
  bool known = false;         // the walk's token's `words` are
  PartialRow::RouteWords words;

  __device__ __forceinline__ PartialSender(const MoeLayerParams& p, int l)
      : params(p), waiter{p}, lane(l) {
    const int last = returns_early(p) ? num_column_blocks(walk.slices()) - 1 : 0;
    walk.start(0, 1, 0, last, false);
  }

  __device__ __forceinline__ bool is_done() const { return !walk.is_item(); }

  // By the whole warp, unless it is done, between looks at what else there is to do: two slices,
  // or a look at the flags of their block.
  __device__ __forceinline__ void step() {
    if (walk.block < complete) {
      return_slices();
    } else {
      look_at_block();
    }
  }

  // Combine goes on from there.
  __device__ __forceinline__ void leave() const {
    if (lane == 0) shared_state().returned = {walk.block, walk.distance, walk.offset};
  }

 private:
  // What is needed of the next token is looked up while this one's rows are on their way.
  __device__ __forceinline__ void return_slices() {
    const PartialRow row(params, lane);
    if (!known) {
      words = row.load_routes(walk.home, walk.token());
      known = true;
    }
    const PartialRow::TokenRoutes routes = row.resolve(words);
    const int home = walk.home;
    const int token = walk.token();
    const int slice = walk.slice();
    const int count = min(min(kBlockSlices - slice % kBlockSlices, walk.count - walk.offset), 2);
    walk.advance(count);
    if (walk.is_item() && (walk.home != home || walk.token() != token)) {
      words = row.load_routes(walk.home, walk.token());
    }
    if (routes.here == 0) return;
    PartialRow::Columns sums[2] = {};
    row.add_up_two<kRoutesAtOnce>(routes, slice * layout::kPartialColumns + lane * 8, count, sums);
    const PartialRecords records(params, lane);
    uint4* to = records.records_of(params.peers.rank, home, token * walk.slices() + slice);
    records.store(to, row.is_inside(slice), sums[0]);
    if (count > 1) records.store(to + layout::kSliceRecords, row.is_inside(slice + 1), sums[1]);
  }

  // One look at the next 32 x 4 flags of the first block that was not complete.
  __device__ __forceinline__ void look_at_block() {
    const int row_tiles = params.hidden / 64;
    const int quads = static_cast<int>(tile_begin(params)[params.num_slots]) * kBlockQuads;
    const int i = found + lane;
    bool there = true;
    if (i < quads) {
      const int tile = i / kBlockQuads;
      const int first = complete * kColumnBlockTiles + i % kBlockQuads * 4;
      const uint4 flags = ptx::ld_relaxed_gpu_v4(
          params.local.fc2_done + tile * params.local.fc2_done_stride + first);
      uint32_t missing = params.step;
      look_at_flags(flags, row_tiles - first, params.step, missing);
      there = missing == params.step;
    }
    if (!__all_sync(0xffffffffu, there)) return;
    found += 32;
    if (found < quads) return;
    ptx::fence_acq_rel_gpu();
    found = 0;
    ++complete;
  }
  static constexpr int kBlockQuads = kColumnBlockTiles / 4;
};

}  // namespace expertd::cuda::moe_layer
