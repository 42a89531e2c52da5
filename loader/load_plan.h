#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "config/cluster_spec.h"
#include "kernels/backend.h"
#include "loader/checkpoint.h"

namespace expertd {

// One matrix to read into one slot.
struct PlannedRead {
  MatrixId id;  // rank counts the process's ranks from 0
  int32_t expert = 0;
  MatrixLocation location;
};

// What a process reads, in file order. Plain data: made without touching a weight, printable.
struct LoadPlan {
  std::vector<PlannedRead> reads;
  int64_t total_bytes = 0;  // codes + scales + second levels
};

// Ranks [first_rank, first_rank + num_ranks) of the placement, every layer of the checkpoint.
LoadPlan MakeLoadPlan(const Checkpoint& checkpoint, const Placement& placement, int32_t first_rank,
                      int32_t num_ranks);

// What one rank would load.
struct RankShare {
  int32_t rank = 0;
  std::vector<int32_t> experts;    // ascending
  std::vector<std::string> files;  // sorted
  int64_t matrices = 0;
  int64_t bytes = 0;
};

// The plan rank by rank, for people: what MakeLoadPlan(checkpoint, ..., first_rank, num_ranks)
// gave.
std::vector<RankShare> SharesOf(const Checkpoint& checkpoint, const LoadPlan& plan,
                                int32_t first_rank, int32_t num_ranks);

}  // namespace expertd
