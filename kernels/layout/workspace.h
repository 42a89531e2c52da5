#pragma once

#include <cstdint>

#include "kernels/layout/host_device.h"

// Device memory of one rank beside the weights, one layout for host and device, pooled over all
// layers. With several ranks it is the symmetric window: every rank has the same shape, and peers
// write the regions named below. Sized for the worst routing: every route of the group to this
// rank. Zeroed once when it is allocated; after that every word is compared with the step that
// wrote it, and nothing is reset. A step that left a fault record ends the workspace: all ranks'
// kernels end, then it is zeroed (or allocated anew) before the next step.
namespace expertd::layout {

inline constexpr int kMaxKernelRanks = 32;  // ranks that exchange rows inside the kernel

struct WorkspaceShape {
  int num_ranks = 1;
  int max_tokens_per_rank = 0;  // T
  int max_top_k = 0;            // K
  int num_slots = 0;            // expert slots of this rank
  int hidden = 0;               // H
  int intermediate = 0;         // I

  // Routes of one rank's tokens.
  EXPERTD_HD constexpr int64_t rank_routes() const {
    return int64_t{1} * max_tokens_per_rank * max_top_k;
  }
  // Routes that can meet on this rank.
  EXPERTD_HD constexpr int64_t max_routes() const { return num_ranks * rank_routes(); }
  // A token tile has at least 8 rows unless it is the last of its slot.
  EXPERTD_HD constexpr int64_t max_token_tiles() const {
    const int64_t routes = max_routes();
    return routes / 8 + (num_slots < routes ? num_slots : routes);
  }
};

// Words at the head.
struct WorkspaceHead {
  uint64_t claim;    // step << 32 | tiles claimed in that step
  uint32_t stopped;  // last step in which some CTA gave up; ends the waits of the others
  uint32_t unused[29];
};

// What a rank tells its peers of each of its routes. It is written and read as one: who finds the
// step in it has the rest. (In memory the last word is sealed: kernels/cuda/moe_layer/record.cuh.)
struct alignas(16) RouteRecord {
  int32_t expert;  // or -1
  float weight;
  int32_t row;  // in its request
  uint32_t step;
};
static_assert(sizeof(RouteRecord) == 16);
// In front of a rank's records: how many tokens it has in the step, and their K.
EXPERTD_HD constexpr RouteRecord RouteHeader(uint32_t step, int tokens, int top_k) {
  return {tokens, 0.0f, top_k, step};
}
EXPERTD_HD constexpr int TokensOf(const RouteRecord& header) { return header.expert; }
EXPERTD_HD constexpr int TopKOf(const RouteRecord& header) { return header.row; }

// Partial rows cross by slices of so many columns, each as records of 16 bytes: up to three of each
// of 32 lanes.
inline constexpr int kPartialColumns = 256;
inline constexpr int kRecordsOfLane = 3;
inline constexpr int kSliceRecords = 32 * kRecordsOfLane;
inline constexpr int kRecordBytes = 16;

EXPERTD_HD constexpr int NumPartialSlices(int hidden) {
  return (hidden + kPartialColumns - 1) / kPartialColumns;
}

// Where `from` writes on `to`: the other ranks in order, from != to.
EXPERTD_HD constexpr int PeerIndex(int from, int to) { return from < to ? from : from - 1; }

// Byte offsets from the workspace's base; every region starts on 256 bytes. P = R - 1 peers.
struct WorkspaceOffsets {
  int64_t head = 0;
  // Written by peers, and by this rank too what has a place for every rank. Two buffers (step mod
  // 2) where a peer may be a step ahead.
  int64_t route_records = 0;  // [2][P][1 + T K] RouteRecord, a header first
  int64_t token_flags = 0;    // [2][R][T] u32, step; nothing if R = 1
  int64_t tokens = 0;         // [2][R][T][H] BF16, likewise; only rows with a route to this rank
  // [P][T][slices][kRecordsOfLane][32] records, sealed like those of routes.
  int64_t partial_records = 0;
  // This rank's own.
  int64_t routes = 0;       // u32: global route by slot, in route order, [ListEntries]
  int64_t route_slots = 0;  // u16: by global route the slot that computes it, or kNowhere, likewise
  int64_t sort_counts = 0;  // [kMaxCtas][slots] u32: routes by slot in a CTA's part, shared sort
  int64_t fc1_done = 0;     // [max_token_tiles][fc1_stride] u32: step that wrote that 64-row tile
  int64_t fc2_done = 0;     // [max_token_tiles][fc2_stride] u32
  int64_t sort_flags = 0;   // [kSortMeetings][kMaxCtas] u32: step in which that CTA has come
  int64_t h = 0;            // [max_routes][I] BF16, by `routes`; a token tile swizzled
  int64_t y = 0;            // [max_routes][H] BF16, by global route
  int64_t bytes = 0;

  int64_t max_routes = 0;
  int64_t own_routes = 0;   // entries of a CTA's own list
  int32_t max_tokens = 0;   // T of the strides
  int64_t rank_routes = 0;  // T K of the strides
};

inline constexpr int kMaxCtas = 144;  // SMs of the largest Hopper part

// A step of up to so many routes is sorted by every CTA for itself, into a list of its own: 132
// CTAs that write the same words slow each other down by 20 us at 1500 routes. A longer one is
// sorted by all together, a part each, into one list. Alone a CTA takes 4 us for 1000 routes; to
// meet twice and to add up what others counted takes 8 us. Here sharing costs half.
inline constexpr int kOwnSortRoutes = 4096;
// A CTA has counted its part; it has placed it.
inline constexpr int kSortMeetings = 2;

// No slot of any rank: of a route that is masked, or whose expert is not there. Global slots are
// below 32 * 1024.
inline constexpr uint16_t kNowhere = 0xffff;

// Entries of `routes` and `route_slots`: the list that CTAs share, then one of each CTA.
EXPERTD_HD constexpr int64_t OwnListRoutes(int64_t max_routes) {
  return max_routes < kOwnSortRoutes ? max_routes : kOwnSortRoutes;
}
EXPERTD_HD constexpr int64_t ListEntries(int64_t max_routes) {
  return max_routes + kMaxCtas * OwnListRoutes(max_routes);
}

// Of one peer's partial rows.
EXPERTD_HD constexpr int64_t RecordBytesOfPeer(int64_t max_tokens, int hidden) {
  return max_tokens * NumPartialSlices(hidden) * kSliceRecords * kRecordBytes;
}

// 64-row tiles of one token tile, padded so that four flags are one 16-byte load.
EXPERTD_HD constexpr int DoneStride(int rows) { return (rows / 64 + 3) / 4 * 4; }

EXPERTD_HD constexpr WorkspaceOffsets PlanWorkspace(const WorkspaceShape& shape) {
  WorkspaceOffsets offsets;
  const int64_t routes = shape.max_routes();
  const int64_t tiles = shape.max_token_tiles();
  const int64_t peers = shape.num_ranks - 1;
  const int64_t peer_tokens = peers * shape.max_tokens_per_rank;
  const int64_t rank_tokens = peers > 0 ? peer_tokens + shape.max_tokens_per_rank : 0;
  offsets.max_routes = routes;
  offsets.own_routes = OwnListRoutes(routes);
  offsets.max_tokens = shape.max_tokens_per_rank;
  offsets.rank_routes = shape.rank_routes();
  int64_t end = 0;
  const int64_t sizes[] = {int64_t{sizeof(WorkspaceHead)},
                           2 * peers * (1 + shape.rank_routes()) * int64_t{sizeof(RouteRecord)},
                           2 * rank_tokens * 4,
                           2 * rank_tokens * shape.hidden * 2,
                           RecordBytesOfPeer(peer_tokens, shape.hidden),
                           ListEntries(routes) * 4,
                           ListEntries(routes) * 2,
                           int64_t{kMaxCtas} * shape.num_slots * 4,
                           tiles * DoneStride(2 * shape.intermediate) * 4,
                           tiles * DoneStride(shape.hidden) * 4,
                           kSortMeetings * kMaxCtas * 4,
                           routes * shape.intermediate * 2,
                           routes * shape.hidden * 2};
  int64_t* const fields[] = {&offsets.head,
                             &offsets.route_records,
                             &offsets.token_flags,
                             &offsets.tokens,
                             &offsets.partial_records,
                             &offsets.routes,
                             &offsets.route_slots,
                             &offsets.sort_counts,
                             &offsets.fc1_done,
                             &offsets.fc2_done,
                             &offsets.sort_flags,
                             &offsets.h,
                             &offsets.y};
  for (int i = 0; i < static_cast<int>(sizeof(sizes) / sizeof(sizes[0])); ++i) {
    *fields[i] = end;
    end = (end + sizes[i] + 255) / 256 * 256;
  }
  offsets.bytes = end;
  return offsets;
}

}  // namespace expertd::layout
