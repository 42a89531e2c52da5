#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/layout/host_device.h"
#include "kernels/layout/workspace.h"

// Where rows and routes lie in the host-launched exchange: plain arithmetic, the same on host and
// device, tested without a GPU.
//
// A rank sends every peer a block of rows: the tokens that have a route to the peer, in token
// order. Outgoing blocks lie in peer order. The rows that a rank computes are its own ones first,
// then the peers' blocks in rank order, so that its own need not wait for anybody's counts. Beside
// a block's rows lie K routes a row and, last, one record that says that the block is complete.
namespace expertd::cuda {

inline constexpr int kMaxExchangeRanks = 64;

// What a rank tells every peer of a step before anything else.
struct ExchangeHeader {
  uint32_t step = 0;
  int32_t layer = 0;
  int32_t tokens = 0;  // T of the sender
  int32_t top_k = 0;   // K of the sender
  int32_t rows = 0;    // of the block that follows
  int32_t unused[3] = {};
};
static_assert(sizeof(ExchangeHeader) == 32, "one aligned transfer");

// A route of a row: a slot of the receiving rank, or -1 where another rank computes it.
struct RouteRecord {
  int32_t slot;
  float weight;
};

// Ends a block of routes, and stands beside a block of partial rows.
struct ExchangeTag {
  uint32_t step;
  uint32_t fault;  // kRoutesTag; beside partial rows the moe_layer::FaultCode of their owner
};
inline constexpr uint32_t kRoutesTag = 0x5461675eu;
static_assert(sizeof(ExchangeTag) == sizeof(RouteRecord), "a tag lies where a route could");

// Begin of a block.
struct BlockBegin {
  int64_t row = 0;
  int64_t record = 0;
};

EXPERTD_HD constexpr int64_t RecordsOf(const ExchangeHeader& header) {
  return int64_t{header.rows} * header.top_k + 1;
}

EXPERTD_HD constexpr BlockBegin After(const BlockBegin& begin, const ExchangeHeader& header) {
  return {begin.row + header.rows, begin.record + RecordsOf(header)};
}

// The block for `peer` among the outgoing ones; sent[q] is what this rank told q.
EXPERTD_HD constexpr BlockBegin OutgoingBlock(const ExchangeHeader* sent, int rank, int peer) {
  BlockBegin begin;
  for (int q = 0; q < peer; ++q) {
    if (q != rank) begin = After(begin, sent[q]);
  }
  return begin;
}

// The rows from `source` among those that this rank computes; received[q] is what q told this rank.
EXPERTD_HD constexpr BlockBegin IncomingBlock(const ExchangeHeader* received, int rank,
                                              int source) {
  BlockBegin begin;
  if (source == rank) return begin;
  begin = After(begin, received[rank]);
  for (int q = 0; q < source; ++q) {
    if (q != rank) begin = After(begin, received[q]);
  }
  return begin;
}

// What an exchange is sized for; the same on every rank.
struct ExchangeShape {
  int32_t num_ranks = 1;            // R, up to kMaxExchangeRanks
  int32_t max_tokens_per_rank = 0;  // T
  int32_t max_top_k = 0;            // K
  int32_t slots_per_rank = 0;
  int64_t hidden_size = 0;        // H
  int64_t intermediate_size = 0;  // I
  bool partials_bf16 = false;     // partial rows are rounded to BF16, a rank's own ones too

  // One rank has the whole row, which is no partial one.
  bool rounds_partials() const { return partials_bf16 && num_ranks > 1; }
  int64_t group_tokens() const { return int64_t{num_ranks} * max_tokens_per_rank; }
  // Rows that a rank sends: a token goes to a peer once, and to no more than K of them.
  int64_t outgoing_rows() const;
  int64_t partial_row_bytes() const { return hidden_size * (rounds_partials() ? 2 : 4); }
};

// INVALID_ARGUMENT with field, found and expected.
absl::Status CheckExchangeShape(const ExchangeShape& shape);

// The layer kernel's workspace over the rows of all ranks, as one rank.
layout::WorkspaceShape LocalWorkspaceShape(const ExchangeShape& shape);

// Byte offsets into one block of device memory, every array from a multiple of 256. `peer_rows`
// holds the outgoing rows (BF16), and later the partial rows that come back for them.
struct ExchangeLayout {
  int64_t sent = 0;         // [R] ExchangeHeader, what this rank tells each rank
  int64_t received = 0;     // [R] ExchangeHeader
  int64_t positions = 0;    // [R][T] i32: row of the token within the block for a rank, or -1
  int64_t peer_rows = 0;    // [outgoing_rows][H] BF16; then F32, or BF16
  int64_t peer_routes = 0;  // [outgoing_rows * K + R] RouteRecord
  int64_t rows = 0;         // [R * T][H] BF16: what this rank computes
  int64_t routes = 0;       // [R * T * K + R] RouteRecord
  int64_t ids = 0;          // [R * T][K of the step] i32: local slot or -1
  int64_t weights = 0;      // [R * T][K of the step] f32
  int64_t partials = 0;     // [R * T][H] F32, or BF16
  int64_t tag = 0;          // ExchangeTag beside the partial rows that this rank returns
  int64_t peer_tags = 0;    // [R] ExchangeTag beside those that come back
  int64_t first_slot = 0;   // [slots + 1] placement of the local step: slot s is expert s
  int64_t slots = 0;        // [slots]
  int64_t workspace = 0;    // the layer kernel's
  int64_t bytes = 0;
};
ExchangeLayout PlanExchangeLayout(const ExchangeShape& shape);

// Device memory of an exchange: the layout's, and what NCCL allocates to connect several ranks.
int64_t ExchangeDeviceBytes(const ExchangeShape& shape);

// One step's transfers as the host sees them, from the counts.
struct ExchangePlan {
  std::vector<BlockBegin> outgoing;  // [R]
  std::vector<BlockBegin> incoming;  // [R]
  int64_t rows = 0;                  // that this rank computes
  int32_t top_k = 0;                 // the largest K of those rows' ranks
  int64_t group_tokens = 0;          // T of all ranks
};
ExchangePlan PlanExchange(int rank, absl::Span<const ExchangeHeader> sent,
                          absl::Span<const ExchangeHeader> received);

// OK if every rank is in this step of this layer and nobody sends more than the shape allows.
absl::Status CheckHeaders(const ExchangeShape& shape, int rank,
                          absl::Span<const ExchangeHeader> received);

// "rank 1", "ranks 1, 3": those whose tag is not of the step; empty if all are.
std::string RanksMissing(int rank, uint32_t step, absl::Span<const ExchangeTag> tags);

}  // namespace expertd::cuda
