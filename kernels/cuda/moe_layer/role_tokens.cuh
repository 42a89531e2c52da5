#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"
#include "kernels/cuda/ptx/copy.cuh"

// Warps that gather the rows of each token tile into the ring, in turns: warp w takes every
// kTokenWarps-th stage. Rows come from x for FC1 and from h for FC2 and lie 128-byte swizzled, as
// wgmma reads them; rows past the tile's last and K past the matrix's end become zeros. A stage is
// announced when its copies have landed and are visible to wgmma. The first stage of an FC2 tile
// waits until the intermediate of its tokens is complete.
namespace expertd::cuda::moe_layer {

struct TokenRole {
  static constexpr int kLaneRows = (kMaxTokenTile + 31) / 32;

  const MoeLayerParams& params;
  Waiter waiter;
  int warp;  // 0..kTokenWarps-1
  int lane;
  PipelineState stage;  // of this warp's next stage
  PipelineState slot;
  int ahead;  // stages from the current tile's first to it

  __device__ __forceinline__ TokenRole(const MoeLayerParams& p, int token_warp, int token_lane)
      : params(p), waiter{p}, warp(token_warp), lane(token_lane), ahead(token_warp) {
    stage.index = token_warp;
  }

  // With several ranks a row of FC1 lies in x or among what peers sent: the top bit of `source`
  // says which, the rest counts from there.
  static constexpr uint32_t kFromPeer = 0x80000000u;

  // What a lane knows of the tile's rows l, l + 32, ... : their routes and where they begin, in
  // units of 16 bytes from the tensor's begin. And one of the tile's factors.
  struct Rows {
    uint32_t route[kLaneRows];
    uint32_t source[kLaneRows];
    float factor;
  };

  __device__ __forceinline__ void find_rows(const TileSlot& tile, bool is_fc1, uint32_t row_chunks,
                                            Rows& rows) const {
    const int row_tiles = is_fc1 ? params.intermediate / 32 : params.hidden / 64;
    const float* factors = (is_fc1 ? params.fc1_factors : params.fc2_factors) +
                           (int64_t{tile.tile.slot} * row_tiles + tile.tile.first_row_tile) * 2;
    rows.factor = ahead == 0 && lane < 2 * tile.tile.num_row_tiles ? factors[lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = lane + 32 * i;
      rows.route[i] = 0;
      rows.source[i] = 0;
      if (row >= tile.rows) continue;
      const uint32_t position = tile.first_route + row;
      rows.route[i] = sorted_routes(params)[position];
      if (is_fc1) {
        rows.source[i] = token_row(rows.route[i]) * row_chunks;
        if (params.peers.num_ranks > 1) rows.source[i] |= peer_bit(rows.route[i]);
      } else {
        rows.source[i] = position * row_chunks;
      }
    }
  }

  __device__ __forceinline__ uint32_t peer_bit(uint32_t route) const {
    return source_of(params, route) == params.peers.rank ? 0 : kFromPeer;
  }

  // Row of a route's token in x, or in what peers sent in this step, [P][max_tokens].
  __device__ __forceinline__ uint32_t token_row(uint32_t route) const {
    if (params.peers.num_ranks == 1) return route / static_cast<uint32_t>(params.top_k);
    const Sources& sources = shared_state().sources;
    const int source = source_of(params, route);
    const uint32_t token = (route - sources.first_route[source]) / sources.top_k[source];
    if (source == params.peers.rank) return token;
    return layout::PeerIndex(source, params.peers.rank) * params.workspace.max_tokens + token;
  }

  // FC1: until the rows that peers send are here.
  __device__ __forceinline__ void wait_for_tokens(const Rows& rows, int count) const {
    uint32_t found[kLaneRows];
    Awaited what = {kWaitTokens, 0, params.peers.rank};
    const uint32_t* flags[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      flags[i] = nullptr;
      if (lane + 32 * i >= count) continue;
      const int source = source_of(params, rows.route[i]);
      if (source == params.peers.rank) continue;
      const Sources& sources = shared_state().sources;
      const uint32_t token = (rows.route[i] - sources.first_route[source]) / sources.top_k[source];
      flags[i] = token_flags(params, source, params.peers.rank) + token;
      what.tile = token;
      what.peer = source;
    }
    (void)waiter.wait_for_peer(what, [&] {
      uint32_t missing = params.step;
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        found[i] = flags[i] == nullptr ? params.step : ptx::ld_acquire_sys(flags[i]);
        if (found[i] != params.step) missing = found[i];
      }
      return missing;
    });
  }

  // By the warp that has the tile's first stage, for those who store results.
  __device__ __forceinline__ void leave_rows(TileSlot& tile, const Rows& rows) const {
    if (lane < 2 * tile.tile.num_row_tiles) tile.factors[lane / 2][lane % 2] = rows.factor;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (lane + 32 * i < tile.rows) tile.route[lane + 32 * i] = rows.route[i];
    }
  }

  __device__ __forceinline__ void wait_for_fc1(int token_tile) const {
    const int row_tiles = params.intermediate / 32;
    const uint32_t* done = params.local.fc1_done + token_tile * params.local.fc1_done_stride;
    waiter.wait_for_ctas(kWaitFc1, token_tile, [&] {
      uint32_t found = params.step;
      for (int i = lane; i < row_tiles; i += 32) {
        const uint32_t value = ptx::ld_relaxed_gpu(done + i);
        if (value != params.step) found = value;
      }
      return found;
    });
  }

  // K range of one stage of all rows: `from` is the lane's chunk of it in row 0, `from_peer` that
  // of what peers sent. A warp copies 128 bytes of four rows at once. kTail: only the first
  // `blocks` of the four 128-byte blocks are there.
  template <bool kPeers, bool kTail>
  __device__ __forceinline__ void copy_stage(int width, int rows, const char* from,
                                             const char* from_peer,
                                             const uint32_t (&source)[kLaneRows],
                                             int blocks) const {
    const int first_row = lane >> 3;
    const uint32_t block_bytes = width * 128;
    // Rows r and r + 4 differ in one bit of the swizzle.
    uint32_t to = token_stage_address(params, stage.index) + first_row * 128 +
                  (((lane & 7) ^ first_row) << 4);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll 2
      for (int row = 32 * i; row < min(width, 32 * i + 32); row += 8) {
#pragma unroll
        for (int r = 0; r < 8; r += 4) {
          const uint32_t offset = __shfl_sync(0xffffffffu, source[i], (row & 31) + r + first_row);
          const char* row_from = from + uint64_t{offset} * 16;
          if (kPeers && (offset & kFromPeer) != 0) {
            row_from = from_peer + uint64_t{offset & ~kFromPeer} * 16;
          }
          const uint32_t row_to = r == 0 ? to : (to ^ 64u) + 512;
          const uint32_t bytes = row + r + first_row < rows ? 16 : 0;
#pragma unroll
          for (int block = 0; block < kStageK / 64; ++block) {
            ptx::cp_async_16(row_to + block * block_bytes, row_from + block * 128,
                             kTail && block >= blocks ? 0 : bytes);
          }
        }
        to += 1024;
      }
    }
  }

  template <bool kPeers>
  __device__ __forceinline__ void copy(int width, int rows, const char* from, const char* from_peer,
                                       const uint32_t (&source)[kLaneRows], int blocks) const {
    if (blocks >= kStageK / 64) {
      copy_stage<kPeers, false>(width, rows, from, from_peer, source, blocks);
    } else {
      copy_stage<kPeers, true>(width, rows, from, from_peer, source, blocks);
    }
  }

  __device__ __forceinline__ void gather(TileSlot& tile) {
    const int num_stages = num_stages_of(tile);
    if (ahead < num_stages) {
      const bool is_fc1 = tile.tile.phase == Phase::kFc1;
      const int k_end = is_fc1 ? params.hidden : params.intermediate;
      const bool peers = is_fc1 && params.peers.num_ranks > 1;
      const char* base = reinterpret_cast<const char*>(is_fc1 ? params.x : params.local.h);
      const char* peer_base = reinterpret_cast<const char*>(params.local.peer_tokens);
      const int width = tile.width;
      const int rows = tile.rows;
      Rows known;
      find_rows(tile, is_fc1, k_end / 8, known);
      if (!is_fc1) wait_for_fc1(tile.tile.token_tile);
      if (peers) wait_for_tokens(known, rows);
      for (; ahead < num_stages; ahead += kTokenWarps) {
        waiter.wait(token_empty_barrier(stage.index), stage.phase ^ 1u);
        __syncwarp();
        const int blocks = (k_end - ahead * kStageK) / 64;
        const int column = ahead * (kStageK * 2) + (lane & 7) * 16;
        if (peers) {
          copy<true>(width, rows, base + column, peer_base + column, known.source, blocks);
        } else {
          copy<false>(width, rows, base + column, nullptr, known.source, blocks);
        }
        if (ahead == 0) leave_rows(tile, known);
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(token_full_barrier(stage.index));
        stage.advance(params.num_token_stages, kTokenWarps);
      }
    }
    ahead -= num_stages;
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      waiter.wait(tile_full_barrier(slot.index), slot.phase);
      __syncwarp();
      TileSlot& tile = shared_state().tiles[slot.index];
      if (tile.rows < 0) break;
      gather(tile);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile_empty_barrier(slot.index));
      slot.advance(kTileSlots);
    }
  }
};

}  // namespace expertd::cuda::moe_layer
