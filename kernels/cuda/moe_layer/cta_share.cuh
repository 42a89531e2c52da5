#pragma once

#include "kernels/cuda/moe_layer/shared_memory.cuh"

// Which tokens, or slices of tokens, a CTA combines and returns.
namespace expertd::cuda::moe_layer {

// Whether a rank has many tokens, more than there are CTAs. Then each CTA takes some of them whole,
// the announcing warps return what is due early, and partial rows are flagged. Of a rank that has
// few the CTAs share slices of tokens, and partial rows cross as records.
__device__ __forceinline__ bool has_many_tokens(int num_tokens) {
  return num_tokens > static_cast<int>(gridDim.x);
}

struct Block {
  int first;
  int count;
};
__device__ __forceinline__ int even_share(int count) {
  const int ctas = static_cast<int>(gridDim.x);
  return (count + ctas - 1) / ctas;
}
__device__ __forceinline__ Block nth_block(int count, int length, int n) {
  const int first = n * length;
  return {first, max(min(length, count - first), 0)};
}
// Of `count` things in order, those that fall to this CTA: on every rank to the CTA of the same
// index, since the ranks' grids are equal.
__device__ __forceinline__ Block share_of(int count) {
  return nth_block(count, even_share(count), static_cast<int>(blockIdx.x));
}
// Where there is one rank, those that fall to the CTA that was the `order`-th to find the list of
// tiles ended: one for each combining warp, if there are so few, so that the last CTAs have none.
__device__ __forceinline__ Block share_in_order(int count, uint32_t order) {
  if (order >= gridDim.x) return {0, 0};
  return nth_block(count, max(even_share(count), kExpertWarps), static_cast<int>(order));
}

// The tokens that fall to this CTA whole, of a rank that has many.
__device__ __forceinline__ Block tokens_of(int num_tokens) {
  return has_many_tokens(num_tokens) ? share_of(num_tokens) : Block{0, 0};
}
__device__ __forceinline__ bool any_has_many_tokens(const MoeLayerParams& params) {
  bool any = false;
#pragma unroll 1
  for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
    any |= has_many_tokens(shared_state().sources.num_tokens[rank]);
  }
  return any;
}

}  // namespace expertd::cuda::moe_layer
