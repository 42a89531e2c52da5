#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/moe_layer/epilogue.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// The weighted sum of each token's expert outputs, by the warps that multiplied, after the tile
// list. When every tile of FC2 is there, a warp takes runs of 256 columns of a token and adds the
// routes in their order in f32. The split over warps does not change what is added to what, so the
// bits are fixed.
namespace expertd::cuda::moe_layer {

struct CombineRole {
  static constexpr int kColumns = 256;  // a lane has 8
  static constexpr int kRowsAtOnce = 8;

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;
  int lane;

  // Each warp looks at its share of the flags; a barrier joins the CTA's warps.
  __device__ __forceinline__ void wait_for_outputs() const {
    const int token_tiles = tile_begin(params)[params.num_slots];
    const int row_tiles = params.hidden / 64;
    const int quads = params.local.fc2_done_stride / 4;
    waiter.wait_for_step(kWaitFc2, blockIdx.x, [&] {
      uint32_t found = params.step;
      for (int i = warp * 32 + lane; i < token_tiles * quads; i += kExpertWarps * 32) {
        const uint4 flags = ptx::ld_relaxed_gpu_v4(params.local.fc2_done + 4 * i);
        const uint32_t words[4] = {flags.x, flags.y, flags.z, flags.w};
        const int first = 4 * (i % quads);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (first + c < row_tiles && words[c] != params.step) found = words[c];
        }
      }
      return found;
    });
    ptx::barrier_sync<kCombineBarrier>(kExpertWarps * 32);
  }

  __device__ __forceinline__ static void add(float (&sum)[8], const uint4& row, float weight) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += weight * __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
    }
  }

  // `present`: routes that have an output; lane k holds the weight of route k.
  __device__ __forceinline__ void combine(int token, int slice, uint32_t present,
                                          float weight) const {
    const int column = slice * kColumns + lane * 8;
    const bool inside = column < params.hidden;
    const uint16_t* y = params.local.y + int64_t{token} * params.top_k * params.hidden + column;
    float sum[8] = {};
    for (int base = 0; base < params.top_k; base += kRowsAtOnce) {
      uint4 rows[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (inside && base + i < 32 && (present >> (base + i) & 1u)) {
          rows[i] = __ldcg(reinterpret_cast<const uint4*>(y + int64_t{base + i} * params.hidden));
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight, (base + i) & 31);
        if (base + i < 32 && (present >> (base + i) & 1u)) add(sum, rows[i], w);
      }
    }
    if (inside) store(sum, int64_t{token} * params.hidden + column);
  }

  __device__ __forceinline__ void store(const float (&sum)[8], int64_t element) const {
    if (params.output_f32) {
      float4* out = reinterpret_cast<float4*>(static_cast<float*>(params.output) + element);
      out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.output) + element) =
          make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                     pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
    }
  }

  // A run of items (token, slice) in token order for each warp of the grid.
  __device__ __forceinline__ void run() const {
    const int slices = (params.hidden + kColumns - 1) / kColumns;
    const int items = params.num_tokens * slices;
    const int warps = gridDim.x * kExpertWarps;
    const int run_length = (items + warps - 1) / warps;
    const int begin = (warp * gridDim.x + blockIdx.x) * run_length;
    const int end = min(begin + run_length, items);
    wait_for_outputs();
    int known = -1;
    uint32_t present = 0;
    float weight = 0;
    for (int item = begin; item < end; ++item) {
      const int token = item / slices;
      if (token != known) {
        const int route = token * params.top_k + lane;
        const bool here = lane < params.top_k && present_routes(params)[route] != 0;
        weight = here ? params.weights[route] : 0.0f;
        present = __ballot_sync(0xffffffffu, here);
        known = token;
      }
      combine(token, item - token * slices, present, weight);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
