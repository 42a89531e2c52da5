#include "config/cluster_spec.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "config/limits.h"

namespace expertd {
namespace {

absl::Status CheckCounts(int32_t num_experts, int32_t num_ranks) {
  if (num_experts < 1 || num_experts > limits::kMaxExperts) {
    return absl::InvalidArgumentError(absl::StrCat("number of experts: got ", num_experts,
                                                   ", expected 1..", limits::kMaxExperts));
  }
  if (num_ranks < 1 || num_ranks > limits::kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("number of ranks: got ", num_ranks, ", expected 1..", limits::kMaxRanks));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Placement> Placement::Contiguous(int32_t num_experts, int32_t num_ranks) {
  if (auto status = CheckCounts(num_experts, num_ranks); !status.ok()) return status;
  const int32_t slots_per_rank = (num_experts + num_ranks - 1) / num_ranks;
  std::vector<int32_t> table(static_cast<size_t>(num_ranks) * slots_per_rank, -1);
  for (int32_t expert = 0; expert < num_experts; ++expert) table[expert] = expert;
  return FromTable(num_experts, num_ranks, std::move(table));
}

absl::StatusOr<Placement> Placement::Redundant(int32_t num_experts, int32_t num_ranks,
                                               int32_t slots_per_rank) {
  if (auto status = CheckCounts(num_experts, num_ranks); !status.ok()) return status;
  if (slots_per_rank < 1 || slots_per_rank > num_experts) {
    return absl::InvalidArgumentError(
        absl::StrCat("slots per rank: got ", slots_per_rank, ", expected 1..", num_experts));
  }
  std::vector<int32_t> table(static_cast<size_t>(num_ranks) * slots_per_rank);
  for (size_t slot = 0; slot < table.size(); ++slot) {
    table[slot] = static_cast<int32_t>(slot % num_experts);
  }
  return FromTable(num_experts, num_ranks, std::move(table));
}

absl::StatusOr<Placement> Placement::FromTable(int32_t num_experts, int32_t num_ranks,
                                               std::vector<int32_t> expert_of_slot) {
  if (auto status = CheckCounts(num_experts, num_ranks); !status.ok()) return status;
  if (expert_of_slot.empty() || expert_of_slot.size() % num_ranks != 0) {
    return absl::InvalidArgumentError(absl::StrCat("placement table: got ", expert_of_slot.size(),
                                                   " slots, expected a multiple of ", num_ranks,
                                                   " ranks"));
  }
  Placement placement;
  placement.num_experts_ = num_experts;
  placement.num_ranks_ = num_ranks;
  placement.slots_per_rank_ = static_cast<int32_t>(expert_of_slot.size() / num_ranks);
  placement.first_slot_.assign(num_experts + 1, 0);
  for (size_t slot = 0; slot < expert_of_slot.size(); ++slot) {
    const int32_t expert = expert_of_slot[slot];
    if (expert < -1 || expert >= num_experts) {
      return absl::InvalidArgumentError(absl::StrCat("placement table: slot ", slot,
                                                     " names expert ", expert, ", expected -1..",
                                                     num_experts - 1));
    }
    if (expert >= 0) ++placement.first_slot_[expert + 1];
  }
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    if (placement.first_slot_[expert + 1] == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("placement table: expert ", expert, " has no slot"));
    }
    placement.first_slot_[expert + 1] += placement.first_slot_[expert];
  }
  placement.slots_.resize(placement.first_slot_[num_experts]);
  std::vector<int32_t> next = placement.first_slot_;
  for (size_t slot = 0; slot < expert_of_slot.size(); ++slot) {
    const int32_t expert = expert_of_slot[slot];
    if (expert >= 0) placement.slots_[next[expert]++] = static_cast<int32_t>(slot);
  }
  placement.expert_of_slot_ = std::move(expert_of_slot);
  return placement;
}

}  // namespace expertd
