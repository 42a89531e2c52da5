#pragma once

#include "kernels/cuda/moe_layer/combine_warp.cuh"
#include "kernels/cuda/moe_layer/role_combine_few.cuh"
#include "kernels/cuda/moe_layer/role_combine_many.cuh"

// The end of a step, by the warps that multiplied, after the tile list. First the tokens of peers
// that have not been returned: what this rank's experts add to them, one partial row a token, is
// stored to the rank that owns the token. Then this rank's own tokens: the ranks' partial rows,
// this one's included, are added in rank order. A partial is the sum of a rank's routes in their
// order in f32. The split over warps does not change what is added to what, so the bits are fixed.
// Here: one rank, and which way to go. role_combine_many.cuh: the tokens of ranks that have many,
// whose partial rows are flagged; role_combine_few.cuh: those of ranks that have few.
namespace expertd::cuda::moe_layer {

// One rank: there is one partial, and it does not cross.
struct CombineAloneRole : CombineWarp {
  static constexpr int kRowsAtOnce = 8;

  using CombineWarp::CombineWarp;

  // A warp's first item is added up before the outputs are there as well, and not stored: its code
  // and all that it looks up are near when they are.
  __device__ __forceinline__ void run(uint32_t order) const {
    const int slices = layout::NumPartialSlices(params.hidden);
    const Block items = share_in_order(params.num_tokens * slices, order);
    if (items.count == 0) return;
    const Run mine = warp_run({items.first, items.first + items.count});
    bool there = false;
    int known = -1;
    PartialRow::TokenRoutes routes;
    int item = mine.begin;
#pragma unroll 1
    do {
      if (item < mine.end) {
        const PartialRow::Slice slice = row.slice_at(item, slices);
        if (slice.token != known) routes = row.routes_of(0, slice.token);
        known = slice.token;
        PartialRow::Columns sum = {};
        row.add_up<kRowsAtOnce>(routes, slice, sum);
        if (slice.inside && there) store(sum, slice.element + lane * 8);
      }
      if (there) {
        ++item;
      } else {
        wait_for_outputs();
        there = true;
      }
    } while (item < mine.end && !waiter.gave_up());
  }
};

// Not inlined: what they keep would cost the multiplying loop registers, and one rank does not run
// the code of several, nor ranks that have few tokens that of many.
static __device__ __noinline__ void combine_many(const MoeLayerParams& params, int warp, int lane) {
  const CombineManyRole role(params, params, warp, lane);
  role.wait_for_outputs();
  role.combine_in_rounds();
}
static __device__ __noinline__ void combine_few(const MoeLayerParams& params,
                                                bool outputs_are_there, int warp, int lane) {
  const MoeLayerParams near = params;
  CombineFewRole(params, near, warp, lane).run(outputs_are_there);
}
static __device__ __noinline__ void combine_ranks(const MoeLayerParams& params, int warp,
                                                  int lane) {
  const bool many = any_has_many_tokens(params);
  if (many) combine_many(params, warp, lane);
  combine_few(params, many, warp, lane);
}
// `order`: of this CTA among those that found the list of tiles ended.
static __device__ __noinline__ void combine_outputs(const MoeLayerParams& params, uint32_t order,
                                                    int warp, int lane) {
  if (params.peers.num_ranks > 1) return combine_ranks(params, warp, lane);
  CombineAloneRole(params, params, warp, lane).run(order);
}

}  // namespace expertd::cuda::moe_layer
