#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace expertd {

// Which expert lies in which slot of which rank. Data, not arithmetic: nobody computes e / E_l.
// Immutable after construction, freely shared between threads.
class Placement {
 public:
  // Rank r holds experts [r * E_l, (r + 1) * E_l) with E_l = ceil(E / R); the last rank fewer.
  static absl::StatusOr<Placement> Contiguous(int32_t num_experts, int32_t num_ranks);

  // Slot p of R * slots_per_rank holds expert p mod E (redundant experts).
  static absl::StatusOr<Placement> Redundant(int32_t num_experts, int32_t num_ranks,
                                             int32_t slots_per_rank);

  // expert_of_slot: [R * slots_per_rank], rank-major, -1 = empty. Every expert needs a slot.
  static absl::StatusOr<Placement> FromTable(int32_t num_experts, int32_t num_ranks,
                                             std::vector<int32_t> expert_of_slot);

  int32_t num_experts() const { return num_experts_; }
  int32_t num_ranks() const { return num_ranks_; }
  int32_t slots_per_rank() const { return slots_per_rank_; }

  // Expert in local slot `slot` of `rank`, or -1.
  int32_t ExpertAt(int32_t rank, int32_t slot) const {
    return expert_of_slot_[static_cast<size_t>(rank) * slots_per_rank_ + slot];
  }
  // Global slots (rank * slots_per_rank + slot) of an expert, ascending, never empty.
  absl::Span<const int32_t> SlotsOf(int32_t expert) const {
    return absl::MakeConstSpan(slots_).subspan(first_slot_[expert],
                                               first_slot_[expert + 1] - first_slot_[expert]);
  }
  // The replica that serves a route: a function of the expert and of the row's index within its
  // own request only, so that neighbours in a batch never change an answer's bits.
  int32_t SlotFor(int32_t expert, int32_t row_in_request) const {
    const auto slots = SlotsOf(expert);
    return slots[static_cast<size_t>(row_in_request) % slots.size()];
  }

 private:
  Placement() = default;

  int32_t num_experts_ = 0;
  int32_t num_ranks_ = 0;
  int32_t slots_per_rank_ = 0;
  std::vector<int32_t> expert_of_slot_;
  std::vector<int32_t> slots_;       // by expert, concatenated
  std::vector<int32_t> first_slot_;  // [E + 1] into slots_
};

}  // namespace expertd
