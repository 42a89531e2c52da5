#pragma once

#include "kernels/cuda/moe_layer/cta_share.cuh"
#include "kernels/cuda/moe_layer/partial_row.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// What the ways to combine have in common.
namespace expertd::cuda::moe_layer {

struct CombineWarp {
  const MoeLayerParams& params;
  Waiter waiter;
  int warp;
  int lane;
  PartialRow row;

  __device__ __forceinline__ CombineWarp(const MoeLayerParams& p, int w, int l)
      : params(p), waiter{p}, warp(w), lane(l), row(p, l) {}

  // Of column blocks begin .. end - 1. Each warp looks at its share of the flags; a barrier joins
  // them.
  __device__ __forceinline__ void wait_for_outputs(int begin, int end) const {
    constexpr int kBlockQuads = kColumnBlockTiles / 4;
    const uint32_t step = params.step;
    const int row_tiles = params.hidden / 64;
    const int stride = params.local.fc2_done_stride;
    const int first = begin * kBlockQuads;
    const int quads = min(end * kBlockQuads, stride / 4) - first;
    const int count = static_cast<int>(tile_begin(params)[params.num_slots]) * quads;
    const uint32_t* flags = params.local.fc2_done + 4 * first;
    waiter.wait_for_ctas(kWaitFc2, blockIdx.x, [&] {
      uint32_t found = step;
#pragma unroll 1
      for (int i = warp * 32 + lane; i < count; i += kExpertWarps * 32) {
        const int tile = i / quads;
        const int quad = i - tile * quads;
        const uint4 words = ptx::ld_relaxed_gpu_v4(flags + tile * stride + 4 * quad);
        look_at_flags(words, row_tiles - 4 * (first + quad), step, found);  // the end is padded
      }
      return found;
    });
    ptx::barrier_sync_aligned<kCombineBarrier>(kCombiningThreads);
    if (warp == 0 && lane == 0) mark(params, kMarkOutputs);
  }

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

  __device__ __forceinline__ void store(const float (&values)[8], int64_t element) const {
    if (params.output_f32) {
      float4* to = reinterpret_cast<float4*>(static_cast<float*>(params.output) + element);
      to[0] = make_float4(values[0], values[1], values[2], values[3]);
      to[1] = make_float4(values[4], values[5], values[6], values[7]);
    } else {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.output) + element) =
          PartialRow::pack(values);
    }
  }

  // total += this rank's own partial, rounded as if it had crossed.
  __device__ __forceinline__ void add_own(const PartialRow::Columns& sum,
                                          PartialRow::Columns& total) const {
    if (row.as_bf16) return PartialRow::add(total, PartialRow::pack(sum), 1.0f);
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] += sum[i];
  }
};

}  // namespace expertd::cuda::moe_layer
