#pragma once

#include "kernels/cuda/moe_layer/combine_warp.cuh"
#include "kernels/cuda/moe_layer/cta_share.cuh"
#include "kernels/cuda/moe_layer/role_combine_ranks.cuh"

// The end of a step, by the warps that multiplied, after the tile list. First the tokens of peers
// that have not been returned: what this rank's experts add to them, one partial row a token, is
// stored to the rank that owns the token. Then this rank's own tokens: the ranks' partial rows,
// this one's included, are added in rank order. A partial is the sum of a rank's routes in their
// order in f32. The split over warps does not change what is added to what, so the bits are fixed.
// Here: one rank. role_combine_ranks.cuh: several.
namespace expertd::cuda::moe_layer {

// One rank: there is one partial, and it does not cross.
struct CombineAloneRole : CombineWarp {
  static constexpr int kRowsAtOnce = 8;

  using CombineWarp::CombineWarp;

  // Items (token, slice) in token order.
  struct Run {
    int begin;
    int end;
  };
  // This warp's part of the CTA's.
  __device__ __forceinline__ Run warp_run(const Run& run) const {
    const int length = (run.end - run.begin + kExpertWarps - 1) / kExpertWarps;
    const int begin = run.begin + warp * length;
    return {begin, min(begin + length, run.end)};
  }

  // Until FC2's tiles are there that slices begin .. end - 1 of a token come from. A lane looks
  // after one route, and every 32 / lanes-th slice.
  __device__ __forceinline__ void wait_for_tiles(const PartialRow::TokenRoutes& routes, int begin,
                                                 int end) const {
    static_assert(layout::kPartialColumns == 4 * layout::kTileRows, "a slice has four flags");
    const int lanes = 1 << (32 - __clz(params.top_k - 1));  // 32 / lanes slices at once
    const int k = lane & (lanes - 1);
    const int slot = __shfl_sync(0xffffffffu, routes.slot, k);
    const bool waits = (routes.here >> k & 1u) != 0;
    const uint32_t* tables = tile_begin(waiter.params);
    const int first = waits ? tables[slot] : 0;
    const int last = waits ? tables[slot + 1] : 0;
    const int row_tiles = params.hidden / layout::kTileRows;
    const int stride = params.local.fc2_done_stride;
    const uint32_t* flags = params.local.fc2_done;
    const uint32_t step = params.step;
    waiter.wait_for_ctas(kWaitFc2, blockIdx.x, [&] {
      uint32_t found = step;
#pragma unroll 1
      for (int slice = begin + lane / lanes; slice < end; slice += 32 / lanes) {
#pragma unroll 1
        for (int tile = first; tile < last; ++tile) {
          const uint4 quad = ptx::ld_relaxed_gpu_v4(flags + tile * stride + 4 * slice);
          look_at_flags(quad, row_tiles - 4 * slice, step, found);  // the row's end is padded
        }
      }
      return found;
    });
    if (warp == 0 && lane == 0) mark(waiter.params, kMarkOutputs);
  }

  // A warp's first slice is added up before its tiles are there as well, and not stored: code and
  // what it looks up are near when they are.
  __device__ __forceinline__ void run(uint32_t order) const {
    const int slices = layout::NumPartialSlices(params.hidden);
    const Block items = share_in_order(params.num_tokens * slices, order);
    const Run mine = warp_run({items.first, items.first + items.count});
    bool warm = false;
#pragma unroll 1
    for (int item = mine.begin; item < mine.end && !waiter.gave_up();) {
      const int token = item / slices;
      const int begin = item - token * slices;
      const int end = min(slices, begin + mine.end - item);
      const PartialRow::TokenRoutes routes = row.routes_of(0, token);
      bool there = false;
#pragma unroll 1
      for (int index = begin; index < end;) {
        if (there || !warm) {
          const PartialRow::Slice slice = row.slice_of(token, index);
          PartialRow::Columns sum = {};
          row.add_up<kRowsAtOnce>(routes, slice, sum);
          if (slice.inside && there) store(sum, slice.element + lane * 8);
        }
        warm = true;
        if (there) {
          ++index;
        } else {
          wait_for_tiles(routes, begin, end);
          there = true;
        }
      }
      item += end - begin;
    }
  }
};

// Not inlined: what they keep would cost the multiplying loop registers, and one rank does not run
// the code of several.
static __device__ __noinline__ void combine_ranks(int warp, int lane) {
  CombineRanksRole(near_params(), warp, lane).run();
}
// `order`: of this CTA among those that found the list of tiles ended.
static __device__ __noinline__ void combine_outputs(uint32_t order) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = ptx::lane_id();
  if (near_params().peers.num_ranks > 1) return combine_ranks(warp, lane);
  CombineAloneRole(near_params(), warp, lane).run(order);
}

}  // namespace expertd::cuda::moe_layer
