#include "kernels/cpu/routing.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "config/check.h"
#include "config/limits.h"

namespace expertd::cpu {

int32_t RoundLimits::TokensPerRound(int32_t top_k) const {
  return std::clamp(limits::kCpuRoundRoutes / (num_ranks * top_k), 1, max_tokens);
}

int32_t RoundLimits::MaxRoutesPerHome() const {
  const int64_t all = int64_t{max_tokens} * limits::kMaxTopK;
  const int64_t round = std::max(limits::kCpuRoundRoutes / num_ranks, limits::kMaxTopK);
  return static_cast<int32_t>(std::min(all, round));
}

HomeRouting::HomeRouting(const RoundLimits& limits, const Placement& placement)
    : placement_(placement),
      max_rows_(limits.MaxRowsPerHome()),
      max_routes_(limits.MaxRoutesPerHome()),
      num_rows_(limits.num_ranks),
      num_routes_(limits.num_ranks),
      rows_(static_cast<size_t>(limits.num_ranks) * max_rows_),
      routes_(static_cast<size_t>(limits.num_ranks) * max_routes_),
      owners_(max_routes_) {}

void HomeRouting::Build(const RankBatch& batch, int32_t begin, int32_t end, int32_t top_k) {
  EXPERTD_CHECK(end - begin <= max_rows_ && (end - begin) * top_k <= max_routes_);
  top_k_ = top_k;
  std::fill(num_rows_.begin(), num_rows_.end(), 0);
  std::fill(num_routes_.begin(), num_routes_.end(), 0);
  for (int32_t token = begin; token < end; ++token) {
    for (int32_t k = 0; k < top_k; ++k) {
      Owner& owner = owners_[static_cast<size_t>(token - begin) * top_k + k];
      const int32_t expert = batch.ids[static_cast<size_t>(token) * top_k + k];
      owner = Owner{};
      if (expert < 0) continue;
      const int32_t slot = placement_.SlotFor(expert, batch.row_in_request[token]);
      owner.rank = slot / placement_.slots_per_rank();
      owner.position = num_routes_[owner.rank]++;
      int32_t* rows = &rows_[static_cast<size_t>(owner.rank) * max_rows_];
      int32_t& num_rows = num_rows_[owner.rank];
      if (num_rows == 0 || rows[num_rows - 1] != token) rows[num_rows++] = token;
      routes_[static_cast<size_t>(owner.rank) * max_routes_ + owner.position] = {
          num_rows - 1, slot % placement_.slots_per_rank()};
    }
  }
}

OwnerRouting::OwnerRouting(const RoundLimits& limits, int32_t num_slots)
    : max_routes_(static_cast<size_t>(limits.MaxRoutesPerHome()) * limits.num_ranks),
      begin_(num_slots + 1),
      fill_(num_slots) {
  arrived_.reserve(max_routes_);
  grouped_.resize(max_routes_);
}

void OwnerRouting::Clear() { arrived_.clear(); }

absl::Status OwnerRouting::Add(absl::Span<const Route> routes, int32_t num_rows,
                               int32_t first_row) {
  if (arrived_.size() + routes.size() > max_routes_) {
    return absl::InvalidArgumentError(absl::StrCat("dispatch: ", arrived_.size() + routes.size(),
                                                   " routes, the buffer holds ", max_routes_));
  }
  const auto num_slots = static_cast<int32_t>(fill_.size());
  for (const Route& route : routes) {
    if (route.row < 0 || route.row >= num_rows || route.slot < 0 || route.slot >= num_slots) {
      return absl::InvalidArgumentError(absl::StrCat("dispatch: route to row ", route.row, " of ",
                                                     num_rows, ", slot ", route.slot, " of ",
                                                     num_slots));
    }
    arrived_.push_back({first_row + route.row, route.slot});
  }
  return absl::OkStatus();
}

// A counting sort: within a slot the order of arrival stays.
void OwnerRouting::GroupBySlot() {
  std::fill(fill_.begin(), fill_.end(), 0);
  for (const Arrived& route : arrived_) ++fill_[route.slot];
  begin_[0] = 0;
  for (size_t slot = 0; slot < fill_.size(); ++slot) {
    begin_[slot + 1] = begin_[slot] + fill_[slot];
    fill_[slot] = begin_[slot];
  }
  for (size_t i = 0; i < arrived_.size(); ++i) {
    grouped_[fill_[arrived_[i].slot]++] = {arrived_[i].row, static_cast<int32_t>(i)};
  }
}

}  // namespace expertd::cpu
