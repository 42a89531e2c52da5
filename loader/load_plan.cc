#include "loader/load_plan.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "config/check.h"

namespace expertd {
namespace {

uint64_t BytesOf(const MatrixLocation& location) {
  return location.codes.bytes + location.scales.bytes + location.second_level.bytes;
}

}  // namespace

LoadPlan MakeLoadPlan(const Checkpoint& checkpoint, const Placement& placement, int32_t first_rank,
                      int32_t num_ranks) {
  EXPERTD_CHECK(first_rank >= 0 && num_ranks > 0 &&
                first_rank + num_ranks <= placement.num_ranks());
  LoadPlan plan;
  for (const LayerSpec& spec : checkpoint.layers()) {
    EXPERTD_CHECK(spec.num_experts == placement.num_experts());
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      for (int32_t slot = 0; slot < placement.slots_per_rank(); ++slot) {
        const int32_t expert = placement.ExpertAt(first_rank + rank, slot);
        if (expert < 0) continue;
        for (int m = 0; m < kNumMatrices; ++m) {
          const auto matrix = static_cast<Matrix>(m);
          const MatrixLocation& location = checkpoint.Locate(spec.layer, expert, matrix);
          EXPERTD_CHECK(location.codes.file >= 0);  // else: not one of CheckpointOptions::experts
          plan.reads.push_back({{rank, spec.layer, slot, matrix}, expert, location});
          plan.total_bytes += static_cast<int64_t>(BytesOf(location));
        }
      }
    }
  }
  // File order: readers that take the next one walk through each file once.
  std::sort(plan.reads.begin(), plan.reads.end(), [](const PlannedRead& a, const PlannedRead& b) {
    const auto key = [](const PlannedRead& read) {
      return std::make_tuple(read.location.codes.file, read.location.codes.offset, read.id.rank,
                             read.id.slot);
    };
    return key(a) < key(b);
  });
  return plan;
}

std::vector<RankShare> SharesOf(const Checkpoint& checkpoint, const LoadPlan& plan,
                                int32_t first_rank, int32_t num_ranks) {
  std::vector<RankShare> shares(static_cast<size_t>(num_ranks));
  std::vector<std::set<int32_t>> experts(shares.size()), files(shares.size());
  for (const PlannedRead& read : plan.reads) {
    const auto rank = static_cast<size_t>(read.id.rank);
    ++shares[rank].matrices;
    shares[rank].bytes += static_cast<int64_t>(BytesOf(read.location));
    experts[rank].insert(read.expert);
    for (const FileRange* range :
         {&read.location.codes, &read.location.scales, &read.location.second_level}) {
      if (range->file >= 0) files[rank].insert(range->file);
    }
  }
  for (size_t rank = 0; rank < shares.size(); ++rank) {
    shares[rank].rank = first_rank + static_cast<int32_t>(rank);
    shares[rank].experts.assign(experts[rank].begin(), experts[rank].end());
    for (const int32_t file : files[rank]) {
      shares[rank].files.push_back(
          checkpoint.files()[static_cast<size_t>(file)].path.filename().string());
    }
  }
  return shares;
}

}  // namespace expertd
