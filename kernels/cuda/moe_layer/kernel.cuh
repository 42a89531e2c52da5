#pragma once

#include "kernels/cuda/moe_layer/first_tokens.cuh"
#include "kernels/cuda/moe_layer/instantiations/instantiations.h"
#include "kernels/cuda/moe_layer/role_announce.cuh"
#include "kernels/cuda/moe_layer/role_combine.cuh"
#include "kernels/cuda/moe_layer/role_expert.cuh"
#include "kernels/cuda/moe_layer/role_route.cuh"
#include "kernels/cuda/moe_layer/role_tokens.cuh"
#include "kernels/cuda/moe_layer/role_weights.cuh"

// One MoE layer step of one rank. See README.md for the schedule, the memory and who signals whom.
//   grid: one CTA an SM, cooperative; block: kThreads
//   weights          -> [bulk copies] -> ring -> expert warpgroups (A operand, in registers)
//   x or rows sent   -> [cp.async]    -> ring -> expert warpgroups (B operand of FC1)
//   h                -> [bulk copies] -> ring -> expert warpgroups (B operand of FC2)
//   expert warpgroups -> h (FC1), y (FC2) in the workspace -> announcing warp: a flag a 64-row tile
//                     -> token warps (h), combine (y)
namespace expertd::cuda::moe_layer {

__device__ __forceinline__ void init_barriers(bool one_ring) {
  SharedState* state = &shared_state();
  for (int i = 0; i < kMaxStages; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&state->full[i]), one_ring ? 2 : 1);
    ptx::mbarrier_init(ptx::shared_address(&state->empty[i]), kExpertWarps);
    ptx::mbarrier_init(ptx::shared_address(&state->token_full[i]), kTokenWarps);
    ptx::mbarrier_init(ptx::shared_address(&state->token_empty[i]), kExpertWarps);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&state->tile_full[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&state->tile_empty[i]), kTokenWarps + 1);
    ptx::mbarrier_init(ptx::shared_address(&state->tile_done[i]), kExpertWarps);
  }
  ptx::mbarrier_init(ptx::shared_address(&state->tokens_asked), 1);
  ptx::mbarrier_init(ptx::shared_address(&state->unwatched), kExpertWarps);
  state->gave_up = kNoFault;
  state->rows_here = 0;
  ptx::fence_mbarrier_init();
}

template <layout::WeightFormat kFormat, int... kWidths>
__device__ __forceinline__ void begin_list(const MoeLayerParams& params) {
  if (post_tile<kWidths...>(params, 0, blockIdx.x)) {
    stream_first_stage<kFormat, Largest<kWidths...>()>(params);
  }
}

// By all warps but the announcing one, which waits for their end and which nobody waits for. Not
// inlined: inside the kernel its branches cost the compiler the proof that the multiplying loop's
// values are the same in a whole warp.
template <layout::WeightFormat kFormat, int... kWidths>
__device__ __noinline__ void route(const MoeLayerParams& given, int warp, int lane) {
  copy_params<kRoutingThreads>(given, warp * 32 + lane);
  sync_routing();
  const MoeLayerParams& params = near_params();
  const bool claims = warp == kExpertWarps && lane == 0;
  const bool told = RouteSorter(params).sort(warp, lane, [&] {
    // The CTA's first tile is posted and its weights are on their way while routes are placed.
    if (claims) begin_list<kFormat, kWidths...>(params);
    __syncwarp();
  });
  if (claims && !told) begin_list<kFormat, kWidths...>(params);
  ptx::fence_proxy_async_shared();
  sync_routing();
  ptx::barrier_arrive<kRoutedBarrier>(kThreads);
  if (warp == 0 && lane == 0) mark(params, kMarkRouted);
}

template <layout::WeightFormat kFormat, int... kWidths>
__global__ void __launch_bounds__(kThreads, 1)
    moe_layer_kernel(const __grid_constant__ MoeLayerParams params) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const int lane = threadIdx.x & 31;
  constexpr int kTokens = Largest<kWidths...>();
  const bool claims = warp == kExpertWarps && lane == 0;
  if (threadIdx.x == 0) {
    mark(params, kMarkStart);
    init_barriers(HasOneRing(kTokens));
  }
  if (claims) open_step(params);
  if (warp >= kExpertWarps) {
    // First of all: those that multiply wait until all four have done it, and the announcing one
    // may still be sending rows when the others have routed. Routing has no more registers then.
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == kAnnouncingWarp) return announce_tiles(params, lane);
    route<kFormat, kWidths...>(params, warp, lane);
    if (warp > kExpertWarps) {
      TokenRole<kTokens>(params, warp - kExpertWarps - 1, lane).run();
    } else if (claims) {
      WeightRole<kFormat, kWidths...>(params).run();
      mark(params, kMarkLastTile);
    }
  } else {
    route<kFormat, kWidths...>(params, warp, lane);
    ask_first_tokens(params, warp, lane);
    ptx::setmaxnreg_inc<kExpertRegisters>();
    wait_for_first_tokens(params);
    const uint32_t order = ExpertRole<kFormat, kWidths...>(params, warp, lane).run();
    if (threadIdx.x == 0) mark(params, kMarkCombine);
    combine_outputs(order);
    if (threadIdx.x == 0) {
      mark(params, kMarkEnd);
      if (gave_up_word() != kNoFault) give_up(params, {gave_up_word(), 0, params.peers.rank}, 0, 0);
    }
  }
}

// The compiled variants of a format: kVariantTokens; their widths are what HasWidth says. NVFP4's
// scales take more registers, so that a third width mostly spills in the loop; in the last one it
// does not, and there halves of what is cut are narrow.
template <layout::WeightFormat kFormat>
Kernel variant_kernel(int variant) {
  if constexpr (kFormat == layout::WeightFormat::kMx) {
    static const Kernel kKernels[kNumVariants] = {
        moe_layer_kernel<kFormat, 8, 16>,      moe_layer_kernel<kFormat, 8, 16, 24>,
        moe_layer_kernel<kFormat, 24, 32>,     moe_layer_kernel<kFormat, 32, 40, 48>,
        moe_layer_kernel<kFormat, 48, 56, 64>, moe_layer_kernel<kFormat, 64, 72, 80>};
    return kKernels[variant];
  } else {
    static const Kernel kKernels[kNumVariants] = {
        moe_layer_kernel<kFormat, 8, 16>,  moe_layer_kernel<kFormat, 16, 24>,
        moe_layer_kernel<kFormat, 24, 32>, moe_layer_kernel<kFormat, 32, 48>,
        moe_layer_kernel<kFormat, 48, 64>, moe_layer_kernel<kFormat, 48, 64, 72>};
    return kKernels[variant];
  }
}

}  // namespace expertd::cuda::moe_layer
