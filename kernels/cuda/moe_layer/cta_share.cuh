#pragma once

#include "kernels/cuda/moe_layer/shared_memory.cuh"

// Which slices of tokens a CTA returns and combines.
namespace expertd::cuda::moe_layer {

struct Block {
  int first;
  int count;
};
__device__ __forceinline__ int even_share(int count) {
  return static_cast<int>(near_params().by_ctas.Quotient(count + gridDim.x - 1));
}
__device__ __forceinline__ Block nth_block(int count, int length, int n) {
  const int first = n * length;
  return {first, max(min(length, count - first), 0)};
}
// Of `count` things in order, those that fall to this CTA.
__device__ __forceinline__ Block share_of(int count) {
  return nth_block(count, even_share(count), static_cast<int>(blockIdx.x));
}
// Where there is one rank, those that fall to the CTA that was the `order`-th to find the list of
// tiles ended: one for each combining warp, if there are so few, so that the last CTAs have none.
__device__ __forceinline__ Block share_in_order(int count, uint32_t order) {
  if (order >= gridDim.x) return {0, 0};
  return nth_block(count, max(even_share(count), kExpertWarps), static_cast<int>(order));
}

// Several ranks: items are slices of tokens, by column block, as FC2 completes them. Of each rank's
// tokens and each block a CTA has a share.
inline constexpr int kBlockSlices = kColumnBlockTiles * 64 / layout::kPartialColumns;
inline constexpr int kBlockQuads = kColumnBlockTiles / 4;  // of a token tile's flags, in fours
__device__ __forceinline__ int num_column_blocks(int slices) {
  return (slices + kBlockSlices - 1) / kBlockSlices;
}

// A walk over the CTA's items: of some column blocks those of the peers' tokens, the next rank's
// first, then of some those of this rank's own.
struct ItemWalk {
  int peers_end;  // column block behind the last of the peers'
  int own_begin;
  int own_end;
  int block = 0;
  int distance = 0;  // from this rank to the tokens' one, 1 .. num_ranks
  int home = 0;      // that rank
  int first = 0;     // the CTA's items of its tokens in a block
  int count = 0;
  int offset = 0;  // among them

  __device__ __forceinline__ static int num_ranks() { return near_params().peers.num_ranks; }
  __device__ __forceinline__ static int slices() {  // of a token
    return layout::NumPartialSlices(near_params().hidden);
  }
  __device__ __forceinline__ bool is_own() const { return distance == num_ranks(); }
  __device__ __forceinline__ bool is_item() const { return !is_own() || block < own_end; }
  // The last block may have fewer slices than the share counts: those are no item.
  __device__ __forceinline__ int slice() const {
    return block * kBlockSlices + (first + offset) % kBlockSlices;
  }
  __device__ __forceinline__ int token() const { return (first + offset) / kBlockSlices; }

  // At item `at` of the peers' in `begin`, or behind them.
  __device__ __forceinline__ void start(int begin, int begin_distance, int at) {
    block = begin;
    distance = begin_distance;
    offset = 0;
    if (begin >= peers_end) leave_peers();
    find_share();
    advance(at);
  }
  __device__ __forceinline__ void advance(int items) {
    offset += items;
#pragma unroll 1
    while (offset >= count && is_item()) {
      offset -= count;
      next_share();
    }
  }

 private:
  __device__ __forceinline__ void leave_peers() {
    distance = num_ranks();
    block = own_begin;
  }
  __device__ __forceinline__ void next_share() {
    if (is_own()) {
      ++block;
    } else if (++distance == num_ranks()) {
      distance = 1;
      if (++block >= peers_end) leave_peers();
    }
    find_share();
  }
  __device__ __forceinline__ void find_share() {
    home = near_params().peers.rank + distance;
    if (home >= num_ranks()) home -= num_ranks();
    const Block share = share_of(shared_state().sources.num_tokens[home] * kBlockSlices);
    first = share.first;
    count = share.count;
  }
};

// Whether the announcing warps return partial rows of the blocks before the last while FC2 runs: if
// nearly every CTA has some. Else they are not worth what looking for them costs.
__device__ __forceinline__ bool returns_early(const MoeLayerParams& params) {
  if (params.stall == kStallPartials) return false;
  bool any = false;
#pragma unroll 1
  for (int rank = 0; rank < params.peers.num_ranks; ++rank) {
    any |= rank != params.peers.rank &&
           shared_state().sources.num_tokens[rank] * kBlockSlices > static_cast<int>(gridDim.x) / 2;
  }
  return any;
}

// The blocks before the last are combined while the last tiles are being multiplied elsewhere: all
// of the peers', and this rank's own where that is done by then.
inline constexpr int kEarlyOwnItems = 4;  // most of a warp
__device__ __forceinline__ bool combines_own_early(const MoeLayerParams& params) {
  return params.num_tokens * ItemWalk::slices() <=
         kEarlyOwnItems * kExpertWarps * static_cast<int>(gridDim.x);
}

}  // namespace expertd::cuda::moe_layer
