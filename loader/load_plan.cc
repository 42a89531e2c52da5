#include "loader/load_plan.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "config/check.h"
#include "loader/expert_table.h"

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

std::string DescribePlan(const Checkpoint& checkpoint, const Placement& placement,
                         const LoadPlan& plan) {
  struct RankTotals {
    std::set<int32_t> experts;
    std::set<int32_t> files;
    int64_t matrices = 0;
    uint64_t bytes = 0;
  };
  std::map<int32_t, RankTotals> ranks;
  for (const PlannedRead& read : plan.reads) {
    RankTotals& totals = ranks[read.id.rank];
    totals.experts.insert(read.expert);
    for (const FileRange* range :
         {&read.location.codes, &read.location.scales, &read.location.second_level}) {
      if (range->file >= 0) totals.files.insert(range->file);
    }
    ++totals.matrices;
    totals.bytes += BytesOf(read.location);
  }
  std::string text;
  for (const auto& [rank, totals] : ranks) {
    absl::StrAppendFormat(
        &text, "rank %d: experts %s of %d, %d matrices, %.1f MB from %d of %d files\n", rank,
        RangesText(std::vector<int32_t>(totals.experts.begin(), totals.experts.end())),
        placement.num_experts(), totals.matrices, static_cast<double>(totals.bytes) / 1e6,
        totals.files.size(), checkpoint.files().size());
  }
  return text;
}

}  // namespace expertd
