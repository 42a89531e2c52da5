#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "config/cluster_spec.h"
#include "kernels/step.h"

namespace expertd::cpu {

// One (token, choice) as its owner sees it. Part of the message, little-endian.
struct Route {
  int32_t row = 0;   // among the rows of the same message
  int32_t slot = 0;  // of the receiving rank
};

// A dispatch message of one home rank to one owner:
//
//   DispatchHeader | rows [num_rows, H] in the step's input dtype | Route [num_routes]
//
// A token is one row however many of its routes go to that owner. The answer of the combine phase
// has no header: y [num_routes, H] f32, in the order of the routes.
struct DispatchHeader {
  int32_t num_rounds = 0;  // that the sender needs for its own tokens
  int32_t num_rows = 0;
  int32_t num_routes = 0;
  int32_t row_bytes = 0;  // a check: both sides speak of the same layer and dtype
};

// How many tokens and routes a rank handles at a time. A step beyond it runs in rounds; rows do not
// see each other, so rounds never change bits.
struct RoundLimits {
  int32_t num_ranks = 0;
  int32_t max_tokens = 0;  // of a rank in a step

  int32_t TokensPerRound(int32_t top_k) const;
  int32_t MaxRoutesPerHome() const;  // over all K
  int32_t MaxRowsPerHome() const { return TokensPerRound(1); }
};

// What a home rank decides about its tokens of one round. Memory is allocated once.
class HomeRouting {
 public:
  struct Owner {
    int32_t rank = -1;     // -1: masked
    int32_t position = 0;  // among the routes sent to that rank
  };

  HomeRouting(const RoundLimits& limits, const Placement& placement);

  // Tokens [begin, end) of the batch.
  void Build(const RankBatch& batch, int32_t begin, int32_t end, int32_t top_k);

  absl::Span<const int32_t> RowsTo(int32_t rank) const {  // token of each row, ascending
    return {&rows_[static_cast<size_t>(rank) * max_rows_], static_cast<size_t>(num_rows_[rank])};
  }
  absl::Span<const Route> RoutesTo(int32_t rank) const {
    return {&routes_[static_cast<size_t>(rank) * max_routes_],
            static_cast<size_t>(num_routes_[rank])};
  }
  // Choice k of token begin + i.
  Owner OwnerOf(int32_t i, int32_t k) const { return owners_[static_cast<size_t>(i) * top_k_ + k]; }

 private:
  const Placement& placement_;
  int32_t max_rows_;
  int32_t max_routes_;
  int32_t top_k_ = 0;
  std::vector<int32_t> num_rows_;    // [R]
  std::vector<int32_t> num_routes_;  // [R]
  std::vector<int32_t> rows_;        // [R, max_rows]
  std::vector<Route> routes_;        // [R, max_routes]
  std::vector<Owner> owners_;        // [max_routes]
};

// The routes of one round that reached an owner, grouped by slot. Routes keep the index they
// arrived with (rank by rank, in message order): that is where their y row lies.
class OwnerRouting {
 public:
  struct Entry {
    int32_t row = 0;    // among all rows of the round at this owner
    int32_t route = 0;  // index of arrival
  };

  OwnerRouting(const RoundLimits& limits, int32_t num_slots);

  void Clear();
  // `first_row`: index of the message's row 0 among all rows.
  absl::Status Add(absl::Span<const Route> routes, int32_t num_rows, int32_t first_row);
  void GroupBySlot();

  int32_t num_routes() const { return static_cast<int32_t>(arrived_.size()); }
  absl::Span<const Entry> OfSlot(int32_t slot) const {
    return absl::MakeConstSpan(grouped_).subspan(begin_[slot], begin_[slot + 1] - begin_[slot]);
  }

 private:
  struct Arrived {
    int32_t row;
    int32_t slot;
  };
  size_t max_routes_;
  std::vector<Arrived> arrived_;
  std::vector<Entry> grouped_;
  std::vector<int32_t> begin_;  // [slots + 1]
  std::vector<int32_t> fill_;   // [slots]
};

}  // namespace expertd::cpu
