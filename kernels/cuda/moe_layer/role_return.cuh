#pragma once

#include "kernels/cuda/moe_layer/cta_share.cuh"
#include "kernels/cuda/moe_layer/partial_records.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// Partial rows of the peers' tokens go back while FC2 still runs: it goes by column block, and when
// the slots have all done one, the announcing warp of each CTA returns those columns of the CTA's
// items. The last block, and what is left when the list of tiles ends, is combine's.
namespace expertd::cuda::moe_layer {

// Between two steps all is in shared memory: the rows that are added up need the registers.
struct PartialSender {
  static constexpr int kRoutesAtOnce = 2;

  const MoeLayerParams& params;
  Waiter waiter;
  int lane;
  int last_block;  // is combine's, with those behind it

  __device__ __forceinline__ PartialSender(const MoeLayerParams& p, int l)
      : params(p),
        waiter{p},
        lane(l),
        last_block(returns_early(p) ? num_column_blocks(ItemWalk::slices()) - 1 : 0) {
    ItemWalk walk = {last_block, last_block, last_block};
    walk.start(0, 1, 0);
    __syncwarp();  // the rows have been sent, which were noted in the same place
    if (lane == 0) {
      state().complete = 0;
      state().found = 0;
      state().known = 0;
    }
    leave(walk);
  }

  __device__ __forceinline__ static ReturnState& state() { return shared_state().returned; }
  __device__ __forceinline__ bool is_done() const { return state().block >= last_block; }

  // By the whole warp, unless it is done, between looks at what else there is to do: a token's
  // slices of a block, or a look at the flags of that block.
  __device__ __forceinline__ void step() const {
    if (state().block < state().complete) {
      return_token();
    } else {
      look_at_block();
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void leave(const ItemWalk& walk) const {
    if (lane == 0) {
      state().block = walk.block;
      state().distance = walk.distance;
      state().offset = walk.offset;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void look_up(const PartialRow& row, const ItemWalk& walk) const {
    const PartialRow::RouteWords words = row.load_routes(walk.home, walk.token());
    state().slot[lane] = words.slot;
    state().weight[lane] = words.weight;
    if (lane == 0) {
      state().first_route = words.first_route;
      state().known = 1;
    }
  }
  __device__ __forceinline__ PartialRow::TokenRoutes routes_of(const PartialRow& row,
                                                               const ItemWalk& walk) const {
    if (state().known == 0) look_up(row, walk);
    __syncwarp();
    const PartialRow::RouteWords words = {state().slot[lane], state().weight[lane],
                                          state().first_route};
    __syncwarp();
    return row.resolve(words);
  }

  // The next token's routes are looked up behind this one's slices.
  __device__ __forceinline__ void return_token() const {
    const PartialRow row(params, lane);
    ItemWalk walk = {last_block, last_block, last_block};
    walk.start(state().block, state().distance, state().offset);
    const int home = walk.home;
    const int token = walk.token();
    const int slice = walk.slice();
    const int count = min(kBlockSlices - slice % kBlockSlices, walk.count - walk.offset);
    const PartialRow::TokenRoutes routes = routes_of(row, walk);
    walk.advance(count);
    leave(walk);
    if (walk.is_item() && (walk.home != home || walk.token() != token)) look_up(row, walk);
    if (routes.here != 0) return_slices(row, routes, home, token, slice, count);
  }

  __device__ __forceinline__ void return_slices(const PartialRow& row,
                                                const PartialRow::TokenRoutes& routes, int home,
                                                int token, int slice, int count) const {
    const PartialRecords records(params, lane);
    uint4* to = records.records_of(params.peers.rank, home, token * ItemWalk::slices() + slice);
#pragma unroll 1
    for (; count > 0; count -= 2, slice += 2, to += 2 * layout::kSliceRecords) {
      PartialRow::Columns sums[2] = {};
      row.add_up_two<kRoutesAtOnce>(routes, slice * layout::kPartialColumns + lane * 8, count,
                                    sums);
      records.store(to, row.is_inside(slice), sums[0]);
      if (count > 1) records.store(to + layout::kSliceRecords, row.is_inside(slice + 1), sums[1]);
    }
  }

  // One look at the next 32 x 4 flags of the first block that was not complete.
  __device__ __forceinline__ void look_at_block() const {
    const int row_tiles = params.hidden / 64;
    const int quads = static_cast<int>(tile_begin(params)[params.num_slots]) * kBlockQuads;
    const int complete = state().complete;
    const int found = state().found;
    const int i = found + lane;
    bool there = true;
    if (i < quads) {
      const int first = complete * kColumnBlockTiles + i % kBlockQuads * 4;
      const uint4 flags = ptx::ld_relaxed_gpu_v4(
          params.local.fc2_done + i / kBlockQuads * params.local.fc2_done_stride + first);
      uint32_t missing = params.step;
      look_at_flags(flags, row_tiles - first, params.step, missing);
      there = missing == params.step;
    }
    if (!__all_sync(0xffffffffu, there)) return;
    const bool all = found + 32 >= quads;
    if (all) ptx::fence_acq_rel_gpu();
    if (lane == 0) {
      state().found = all ? 0 : found + 32;
      if (all) state().complete = complete + 1;
    }
  }
};

}  // namespace expertd::cuda::moe_layer
