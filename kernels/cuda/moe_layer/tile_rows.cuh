#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/row_watcher.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

namespace expertd::cuda::moe_layer {

// What a lane of a token warp knows of a tile's rows l, l + 32, ... : their routes and, for FC1,
// where they begin in x or in what the ranks sent, in units of 16 bytes. And one of the tile's
// factors. kTokens: most rows of a tile.
template <int kTokens>
struct TileRows {
  static constexpr int kLaneRows = (kTokens + 31) / 32;

  uint32_t route[kLaneRows];
  uint32_t source[kLaneRows];
  float factor;

  // The factor only if it is asked for. Nothing waits for what is loaded.
  __device__ __forceinline__ void find(const MoeLayerParams& params, const TileSlot& tile,
                                       bool is_fc1, bool with_factor, int lane) {
    const uint32_t row_chunks = params.hidden / 8;
    const int row_tiles = is_fc1 ? params.intermediate / 32 : params.hidden / 64;
    const float* factors = (is_fc1 ? params.fc1_factors : params.fc2_factors) +
                           (int64_t{tile.tile.slot} * row_tiles + tile.tile.first_row_tile) * 2;
    factor = with_factor && lane < 2 * tile.tile.num_row_tiles ? factors[lane] : 0.0f;
    const bool near = list_is_near(params);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = lane + 32 * i;
      route[i] = 0;
      source[i] = 0;
      if (row >= tile.rows) continue;
      const uint32_t position = tile.first_route + row;
      route[i] = sorted_route(params, near, position);
      if (is_fc1) source[i] = token_row(params, route[i]) * row_chunks;
    }
  }

  // Row of a route's token in x or, with several ranks, in what they sent in this step, [R][T].
  __device__ __forceinline__ static uint32_t token_row(const MoeLayerParams& params,
                                                       uint32_t route) {
    if (params.peers.num_ranks == 1) return params.by_top_k.Quotient(route);
    const Sources& sources = shared_state().sources;
    const int source = source_of(params, route);
    const uint32_t token = (route - sources.first_route[source]) / sources.top_k[source];
    return source * params.workspace.max_tokens + token;
  }

  // FC1, several ranks: until the rows are here, this rank's own too. The announcing warp may have
  // seen them already.
  __device__ __forceinline__ void wait_for_tokens(const MoeLayerParams& params,
                                                  const TileSlot& tile, int lane) const {
    if (rows_are_here(tile.first_route + tile.rows)) return;
    uint32_t found[kLaneRows];
    Awaited what = {kWaitTokens, 0, params.peers.rank};
    const uint32_t* flags[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      flags[i] = nullptr;
      if (lane + 32 * i < tile.rows) flags[i] = token_flag(params, route[i], what);
    }
    (void)Waiter{params}.wait_for_peer(what, [&] {
      uint32_t missing = params.step;
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        found[i] = flags[i] == nullptr ? params.step : ptx::ld_acquire_sys(flags[i]);
        if (found[i] != params.step) missing = found[i];
      }
      return missing;
    });
  }

  // For those who store results.
  __device__ __forceinline__ void leave_in(TileSlot& tile, int lane) const {
    if (lane < 2 * tile.tile.num_row_tiles) tile.factors[lane / 2][lane % 2] = factor;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (lane + 32 * i < tile.rows) tile.route[lane + 32 * i] = route[i];
    }
  }
};

}  // namespace expertd::cuda::moe_layer
