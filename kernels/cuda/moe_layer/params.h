#pragma once

#include <cstdint>

#include "kernels/cuda/comm/peer.h"
#include "kernels/cuda/moe_layer/divisor.h"
#include "kernels/cuda/moe_layer/scheduler.h"
#include "kernels/layout/packed_weights.h"
#include "kernels/layout/workspace.h"

namespace expertd::cuda::moe_layer {

// Who waited for whom when a step gave up. In host-mapped memory of the waiting rank, zero before
// the step; the first CTA that gives up claims it (`code`), fills it and sets `complete` last.
struct FaultRecord {
  uint32_t code;  // FaultCode
  uint32_t step;
  uint32_t cta;
  uint32_t tile;      // what was waited for: the code says which number this is
  uint32_t peer;      // the rank that was waited for; this rank where nobody else was
  uint32_t found;     // what the word read
  uint32_t expected;  // what it was waited for
  uint32_t waited_us;
  uint32_t complete;
};

enum FaultCode : uint32_t {
  kNoFault = 0,
  kWaitFc1 = 1,       // an FC2 tile waited for the intermediate of its tokens; tile: token tile
  kWaitFc2 = 2,       // combine waited for the expert outputs of this rank; tile: CTA
  kWaitPipeline = 3,  // a wait inside a CTA: a defect of this kernel or of the machine
  kStopped = 4,       // the host's stop word
  kWaitRoutes = 5,    // routing waited for a peer; tile: 0 for its header, 1 + one of its routes
  kWaitTokens = 6,    // an FC1 tile waited for a row; tile: token of `peer`, maybe this rank itself
  kWaitPartials = 7,  // combine waited for a peer's partial row; tile: token of this rank
  kWaitSort = 8,      // a shared sort waited for another CTA; tile: that CTA
};

// For tests: who does this never does it, so that whoever waits for it must give up.
enum StallPoint : int32_t {
  kStallNowhere = 0,
  kStallRoutes = 1,    // dispatch sends nothing of the routes
  kStallTokens = 2,    // dispatch sends no rows
  kStallFc1 = 3,       // nobody announces FC1 tiles
  kStallFc2 = 4,       // nobody announces FC2 tiles
  kStallPartials = 5,  // nobody returns partial rows
  kStallCount = 6,     // CTA 0 comes to no meeting of the sort
  kStallPlace = 7,     // CTA 0 does not come to the last one
  kStallRecords = 8,   // dispatch sends the header that counts the routes, and no route
};

// Where Launch finds the regions of this rank's workspace (layout::WorkspaceOffsets) that it reads
// and writes as plain memory. Of these peers write `tokens` only.
struct LocalMemory {
  layout::WorkspaceHead* head = nullptr;
  uint32_t* routes = nullptr;       // layout::ListEntries
  uint16_t* route_slots = nullptr;  // likewise
  uint32_t* sort_counts = nullptr;
  uint32_t* sort_flags = nullptr;
  uint32_t* fc1_done = nullptr;
  uint32_t* fc2_done = nullptr;
  uint16_t* h = nullptr;
  uint16_t* y = nullptr;
  const uint16_t* tokens = nullptr;  // [R][max_tokens][H], what all ranks send in this step
  int64_t max_routes = 0;
  int64_t own_routes = 0;
  int32_t fc1_done_stride = 0;
  int32_t fc2_done_stride = 0;
};

// Everything one launch needs; pointers are device addresses.
struct MoeLayerParams {
  // sizes
  int32_t num_tokens = 0;    // T, rows of this rank
  int32_t top_k = 0;         // K, 1..32
  int32_t hidden = 0;        // H, multiple of 64
  int32_t intermediate = 0;  // I, multiple of 64
  int32_t num_experts = 0;   // E, of the layer
  int32_t num_slots = 0;     // expert slots of this rank
  int32_t slots_per_rank = 0;

  // the step
  const uint16_t* x = nullptr;              // [T, H] BF16, 16-byte aligned
  const int32_t* ids = nullptr;             // [T, K] expert or -1
  const float* weights = nullptr;           // [T, K]; not read where the id is -1
  const int32_t* row_in_request = nullptr;  // [T], or null: 0, 1, ... (matters for replicas only)
  void* output = nullptr;                   // [T, H]; every element is written
  int32_t output_f32 = 0;                   // output is F32 instead of BF16
  uint32_t step = 0;  // 1, 2, ... since the workspace was zeroed, the same on every rank

  // placement: the replica of a route is slots[first_slot[e] + row_in_request % count]
  const int32_t* first_slot = nullptr;  // [E + 1]
  const int32_t* slots = nullptr;       // global slots, rank * slots_per_rank + slot

  // the layer
  const uint8_t* fc1_units = nullptr;  // layout::PackedMatrix{format, 2 I, H} by slot
  const uint8_t* fc2_units = nullptr;  // layout::PackedMatrix{format, H, I} by slot
  const float* fc1_factors = nullptr;  // [slots][tile][half]
  const float* fc2_factors = nullptr;
  float swiglu_limit = 0;  // 0 = no clamp; Launch makes infinity of that

  // memory of the ranks
  PeerMap peers;
  int32_t partials_bf16 = 0;  // partial rows cross rounded to BF16 instead of as F32
  layout::WorkspaceOffsets workspace;
  LocalMemory local;  // set by Launch

  // configuration (kernel_config.h)
  int32_t token_tile = 0;   // most rows of a token tile, multiple of 8
  int32_t num_stages = 0;   // of either ring
  int32_t near_routes = 0;  // up to so many the CTA's list of routes is in shared memory
  // Shared memory, set by Launch: see shared_memory.cuh.
  uint32_t token_stride = 0;  // from one token stage to the next
  uint32_t tokens_offset = 0;
  uint32_t tables_offset = 0;
  uint32_t list_offset = 0;
  // Divided on the host, so that routing need not; set by Launch.
  ScheduleShape schedule;
  Divisor by_top_k;
  Divisor by_slots_per_rank;
  Divisor by_token_tile;
  Divisor by_ctas;
  int32_t x_share = 0;  // one rank: bytes of x that a CTA brings to L2; 0: x is too large for that
  // Most routes of a step that every CTA sorts for itself; tests have fewer.
  int32_t own_sort_routes = layout::kOwnSortRoutes;

  // control, host-mapped
  const uint32_t* stop = nullptr;  // non-zero: end soon
  FaultRecord* fault = nullptr;
  uint64_t timeout_ns = 0;  // of a wait for a peer; others last a little longer: see wait.cuh
  StallPoint stall = kStallNowhere;

  uint64_t* timing = nullptr;  // [CTA][kTimingMarks] globaltimer, if the kernel records it
};

}  // namespace expertd::cuda::moe_layer
