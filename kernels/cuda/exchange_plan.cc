#include "kernels/cuda/exchange_plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/limits.h"

namespace expertd::cuda {
namespace {

absl::Status CheckRange(const char* field, int64_t found, int64_t most) {
  if (found >= 1 && found <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("exchange: ", field, ": found ", found, ", expected 1 to ", most));
}

absl::Status CheckHeader(const ExchangeShape& shape, int rank, int source,
                         const ExchangeHeader& found, const ExchangeHeader& own) {
  if (found.step != own.step || found.layer != own.layer) {
    return absl::InternalError(absl::StrCat("rank ", rank, " is in step ", own.step, " layer ",
                                            own.layer, ", rank ", source, " in step ", found.step,
                                            " layer ", found.layer));
  }
  if (found.tokens < 0 || found.tokens > shape.max_tokens_per_rank || found.rows < 0 ||
      found.rows > found.tokens || found.top_k < 1 || found.top_k > shape.max_top_k) {
    return absl::InternalError(
        absl::StrCat("step ", own.step, ": rank ", source, " sends ", found.rows, " of ",
                     found.tokens, " rows of K = ", found.top_k, ", the buffers are sized for ",
                     shape.max_tokens_per_rank, " rows of K = ", shape.max_top_k));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t ExchangeShape::outgoing_rows() const {
  return int64_t{max_tokens_per_rank} * std::min(max_top_k, num_ranks - 1);
}

absl::Status CheckExchangeShape(const ExchangeShape& shape) {
  // The layer kernel counts 16-byte units of its arrays in 32 bits.
  constexpr int64_t kMostUnits = std::numeric_limits<uint32_t>::max();
  const int64_t routes = shape.group_tokens() * shape.max_top_k;
  for (const absl::Status& status : {
           CheckRange("ranks", shape.num_ranks, kMaxExchangeRanks),
           CheckRange("max_tokens_per_rank", shape.max_tokens_per_rank, limits::kMaxTokensPerRank),
           CheckRange("top_k", shape.max_top_k, limits::kMaxTopK),
           CheckRange("slots_per_rank", shape.slots_per_rank, limits::kMaxExperts),
           CheckRange("hidden_size", shape.hidden_size, limits::kMaxHiddenSize),
           CheckRange("intermediate_size", shape.intermediate_size, limits::kMaxIntermediateSize),
           CheckRange("rows of hidden states, all ranks, in units of 16 bytes",
                      shape.group_tokens() * shape.hidden_size / 8, kMostUnits),
           CheckRange("rows of h, all routes of all ranks, in units of 16 bytes",
                      routes * shape.intermediate_size / 8, kMostUnits),
       }) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

layout::WorkspaceShape LocalWorkspaceShape(const ExchangeShape& shape) {
  return {.num_ranks = 1,
          .max_tokens_per_rank = static_cast<int>(shape.group_tokens()),
          .max_top_k = shape.max_top_k,
          .num_slots = shape.slots_per_rank,
          .hidden = static_cast<int>(shape.hidden_size),
          .intermediate = static_cast<int>(shape.intermediate_size)};
}

ExchangeLayout PlanExchangeLayout(const ExchangeShape& shape) {
  const int64_t ranks = shape.num_ranks;
  const int64_t rows = shape.group_tokens();
  const int64_t routes = rows * shape.max_top_k;
  const int64_t out_rows = shape.outgoing_rows();
  const int64_t header_bytes = ranks * static_cast<int64_t>(sizeof(ExchangeHeader));
  const int64_t record_bytes = sizeof(RouteRecord);
  ExchangeLayout layout;
  for (const auto& [offset, bytes] : {
           std::pair(&layout.sent, header_bytes),
           std::pair(&layout.received, header_bytes),
           std::pair(&layout.positions, rows * 4),
           std::pair(&layout.peer_rows,
                     out_rows * std::max(shape.hidden_size * 2, shape.partial_row_bytes())),
           std::pair(&layout.peer_routes, (out_rows * shape.max_top_k + ranks) * record_bytes),
           std::pair(&layout.rows, rows * shape.hidden_size * 2),
           std::pair(&layout.routes, (routes + ranks) * record_bytes),
           std::pair(&layout.ids, routes * 4),
           std::pair(&layout.weights, routes * 4),
           std::pair(&layout.partials, rows * shape.partial_row_bytes()),
           std::pair(&layout.tag, int64_t{sizeof(ExchangeTag)}),
           std::pair(&layout.peer_tags, ranks * static_cast<int64_t>(sizeof(ExchangeTag))),
           std::pair(&layout.first_slot, (int64_t{shape.slots_per_rank} + 1) * 4),
           std::pair(&layout.slots, int64_t{shape.slots_per_rank} * 4),
           std::pair(&layout.workspace, layout::PlanWorkspace(LocalWorkspaceShape(shape)).bytes),
       }) {
    *offset = layout.bytes;
    layout.bytes += (bytes + 255) / 256 * 256;
  }
  return layout;
}

int64_t ExchangeDeviceBytes(const ExchangeShape& shape) {
  return PlanExchangeLayout(shape).bytes + (shape.num_ranks > 1 ? limits::kNcclExchangeBytes : 0);
}

ExchangePlan PlanExchange(int rank, absl::Span<const ExchangeHeader> sent,
                          absl::Span<const ExchangeHeader> received) {
  ExchangePlan plan;
  for (int q = 0; q < static_cast<int>(received.size()); ++q) {
    plan.outgoing.push_back(OutgoingBlock(sent.data(), rank, q));
    plan.incoming.push_back(IncomingBlock(received.data(), rank, q));
    plan.rows += received[q].rows;
    plan.group_tokens += received[q].tokens;
    if (received[q].rows > 0) plan.top_k = std::max(plan.top_k, received[q].top_k);
  }
  return plan;
}

absl::Status CheckHeaders(const ExchangeShape& shape, int rank,
                          absl::Span<const ExchangeHeader> received) {
  for (int source = 0; source < static_cast<int>(received.size()); ++source) {
    absl::Status status = CheckHeader(shape, rank, source, received[source], received[rank]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string RanksMissing(int rank, uint32_t step, absl::Span<const ExchangeTag> tags) {
  std::string missing;
  int count = 0;
  for (int q = 0; q < static_cast<int>(tags.size()); ++q) {
    if (q == rank || tags[q].step == step) continue;
    absl::StrAppend(&missing, count == 0 ? "" : ", ", q);
    ++count;
  }
  if (count == 0) return missing;
  return absl::StrCat(count == 1 ? "rank " : "ranks ", missing);
}

}  // namespace expertd::cuda
