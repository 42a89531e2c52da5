#pragma once

#include <cstdint>

#include "kernels/layout/host_device.h"

// Device memory of one rank beside the weights, one layout for host and device, pooled over all
// layers. Sized for the worst routing: every route of the group to this rank. Zeroed once when it
// is allocated; after that every word is compared with the step that wrote it, and nothing is
// reset. A step that left a fault record ends the workspace: it is zeroed (or allocated anew)
// before the next step.
namespace expertd::layout {

struct WorkspaceShape {
  int num_ranks = 1;
  int max_tokens_per_rank = 0;  // T
  int max_top_k = 0;            // K
  int num_slots = 0;            // expert slots of this rank
  int hidden = 0;               // H
  int intermediate = 0;         // I

  // Routes that can meet on this rank.
  EXPERTD_HD constexpr int64_t max_routes() const {
    return int64_t{1} * num_ranks * max_tokens_per_rank * max_top_k;
  }
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

// Byte offsets from the workspace's base; every region starts on 256 bytes.
struct WorkspaceOffsets {
  int64_t head = 0;
  int64_t routes = 0;   // [kMaxCtas][max_routes] u32: route (t * K + k) by slot, in route order
  int64_t present = 0;  // [kMaxCtas][max_routes] u8: whether this rank computes the route
  int64_t fc1_done =
      0;  // [max_token_tiles][fc1_stride] u32: step in which that 64-row tile was written
  int64_t fc2_done = 0;  // [max_token_tiles][fc2_stride] u32
  int64_t h = 0;         // [max_routes][I] BF16, in the order of `routes`
  int64_t y = 0;         // [max_routes][H] BF16, by route
  int64_t bytes = 0;
  int64_t max_routes = 0;
};

// Every CTA sorts the routes for itself; a copy each, for 132 of them that write the same words
// slow each other down by 20 us at 1500 routes.
inline constexpr int kMaxCtas = 144;  // SMs of the largest Hopper part

// 64-row tiles of one token tile, padded so that four flags are one 16-byte load.
EXPERTD_HD constexpr int DoneStride(int rows) { return (rows / 64 + 3) / 4 * 4; }

EXPERTD_HD constexpr WorkspaceOffsets PlanWorkspace(const WorkspaceShape& shape) {
  WorkspaceOffsets offsets;
  const int64_t routes = shape.max_routes();
  const int64_t tiles = shape.max_token_tiles();
  int64_t end = 0;
  const int64_t sizes[] = {int64_t{sizeof(WorkspaceHead)},
                           routes * 4 * kMaxCtas,
                           routes * kMaxCtas,
                           tiles * DoneStride(2 * shape.intermediate) * 4,
                           tiles * DoneStride(shape.hidden) * 4,
                           routes * shape.intermediate * 2,
                           routes * shape.hidden * 2};
  int64_t* const fields[] = {&offsets.head,     &offsets.routes,   &offsets.present,
                             &offsets.fc1_done, &offsets.fc2_done, &offsets.h,
                             &offsets.y};
  for (int i = 0; i < 7; ++i) {
    *fields[i] = end;
    end = (end + sizes[i] + 255) / 256 * 256;
  }
  offsets.bytes = end;
  offsets.max_routes = routes;
  return offsets;
}

}  // namespace expertd::layout
