#pragma once

#include "kernels/cuda/moe_layer/role_return.cuh"
#include "kernels/cuda/moe_layer/row_watcher.cuh"
#include "kernels/cuda/moe_layer/token_sender.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"

// One warp tells the other CTAs that a tile's results are there: when all multiplying warps have
// stored theirs, one fence for all of them (it covers what this warp has observed) and a flag for
// each 64-row tile. The multiplying warps never wait for their own stores. While a tile is being
// computed the warp talks to the peers, if this step leaves that to it: first it sends the tokens
// that are left, then it looks which rows have come, then it returns partial rows.
namespace expertd::cuda::moe_layer {

struct AnnounceRole {
  const MoeLayerParams& params;
  Waiter waiter;
  int lane;
  PipelineState slot;
  bool list_ended = false;
  bool described = false;  // the next tile is, and its results are waited for

  __device__ __forceinline__ AnnounceRole(const MoeLayerParams& p, int announce_lane)
      : params(p), waiter{p}, lane(announce_lane) {}

  __device__ __forceinline__ uint32_t* flags_of(const Tile& tile) const {
    return tile.phase == Phase::kFc1
               ? params.local.fc1_done + tile.token_tile * params.local.fc1_done_stride
               : params.local.fc2_done + tile.token_tile * params.local.fc2_done_stride;
  }

  // What a tile's warps stored after one of its waits was given up is not announced.
  __device__ __forceinline__ bool may_announce(const Tile& tile) const {
    const StallPoint stall = tile.phase == Phase::kFc1 ? kStallFc1 : kStallFc2;
    return !waiter.gave_up() && params.stall != stall;
  }

  __device__ __forceinline__ void announce() {
    const Tile& tile = shared_state().tiles[slot.index].tile;
    if (lane < tile.num_row_tiles && may_announce(tile)) {
      if (tile.phase == Phase::kFc1) ptx::fence_proxy_async_global();  // the copy engine reads h
      ptx::fence_acq_rel_gpu();
      ptx::st_relaxed_gpu(flags_of(tile) + tile.first_row_tile + lane, params.step);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(tile_empty_barrier(slot.index));
    slot.advance(kTileSlots);
  }

  __device__ __forceinline__ uint32_t next_barrier() const {
    return described ? tile_done_barrier(slot.index) : tile_full_barrier(slot.index);
  }
  // next_barrier() has been passed.
  __device__ __forceinline__ void go_on() {
    if (described) {
      announce();
    } else {
      list_ended = shared_state().tiles[slot.index].rows < 0;
    }
    described = !described && !list_ended;
  }
  __device__ __forceinline__ bool try_go_on() {
    if (list_ended) return false;
    if (!__all_sync(0xffffffffu, ptx::mbarrier_test_wait(next_barrier(), slot.phase))) return false;
    go_on();
    return true;
  }

  // Once begun every token goes out, whatever happens to the list.
  __device__ __forceinline__ void send_tokens() {
    TokenSender tokens(params, lane);
    while (!tokens.done) {
      if (!try_go_on()) tokens.step();
    }
  }

  // Until all rows have come that this rank computes, or the list ends.
  __device__ __forceinline__ void watch_rows() {
    RowWatcher rows(params, lane);
    while (!list_ended && !rows.is_done() && !waiter.gave_up()) {
      if (!try_go_on()) rows.step();
    }
  }

  // Until the list ends; what is left then is the combining warps'.
  __device__ __forceinline__ void return_partials() {
    PartialSender partials(params, lane);
    while (!list_ended) {
      if (try_go_on()) continue;
      if (!partials.is_done() && !waiter.gave_up()) {
        partials.step();
      } else {
        waiter.wait(next_barrier(), slot.phase);
        go_on();
      }
    }
    __syncwarp();
    ptx::barrier_sync<kReturnedBarrier>(kReturningThreads);
  }

  __device__ __forceinline__ void run_alone() {
    while (!list_ended) {
      waiter.wait(next_barrier(), slot.phase);
      go_on();
    }
  }
};

// All that the announcing warp does: while the others route it sends the first rows. Not inlined,
// so that the compiler sees the multiplying loop alone; and one function, since with a second call
// in that warp's branch ptxas finds no registers. It keeps to those that its warp has left.
static __device__ __noinline__ void announce_tiles(const MoeLayerParams& given, int lane) {
  copy_params<32>(given, lane);
  __syncwarp();
  const MoeLayerParams& params = near_params();
  begin_tokens(params, lane);
  ptx::barrier_sync<kRoutedBarrier>(kThreads);
  AnnounceRole role(params, lane);
  if (params.peers.num_ranks == 1) return role.run_alone();
  role.send_tokens();
  role.watch_rows();
  role.return_partials();
}

}  // namespace expertd::cuda::moe_layer
