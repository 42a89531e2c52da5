#include "loader/inspect.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/cluster_spec.h"
#include "config/limits.h"
#include "loader/verify.h"

namespace expertd {
namespace {

std::vector<BackendVerdict> Backends(const LayerSpec& spec) {
  std::vector<BackendVerdict> backends = {
      {.backend = "cpu", .architecture = "any", .can_serve = true}};
  BackendVerdict cuda{.backend = "cuda", .architecture = "sm_90a", .can_serve = true};
  for (const auto& [name, size] : {std::pair{"hidden_size", spec.hidden_size},
                                   std::pair{"moe_intermediate_size", spec.intermediate_size}}) {
    if (size % limits::kCudaGeometryMultiple == 0) continue;
    cuda.can_serve = false;
    absl::StrAppend(&cuda.reason, cuda.reason.empty() ? "" : "; ", name, ": found ", size,
                    ", expected a multiple of ", limits::kCudaGeometryMultiple);
  }
  backends.push_back(std::move(cuda));
  return backends;
}

std::vector<int32_t> ExpertsOf(const Placement& placement, int32_t rank) {
  std::vector<int32_t> experts;
  for (int32_t slot = 0; slot < placement.slots_per_rank(); ++slot) {
    if (const int32_t expert = placement.ExpertAt(rank, slot); expert >= 0)
      experts.push_back(expert);
  }
  return experts;
}

}  // namespace

InspectReport Inspect(const std::filesystem::path& dir, const InspectOptions& options) {
  Problems problems;
  Checkpoint checkpoint = Checkpoint::Examine(dir, options.checkpoint, &problems);
  InspectReport report{.dir = dir, .checkpoint = std::move(checkpoint), .problems = problems};
  if (report.checkpoint.layers().empty()) return report;

  const LayerSpec spec = report.checkpoint.layers().front();
  const absl::StatusOr<Placement> placement =
      Placement::Contiguous(spec.num_experts, options.num_ranks);
  if (!placement.ok()) {
    report.problems.Add(absl::StrCat("--ranks: ", std::string(placement.status().message())));
    return report;
  }
  if (options.rank >= options.num_ranks) {
    report.problems.Add(absl::StrCat("--rank: found ", options.rank,
                                     ", expected below --ranks = ", options.num_ranks));
    return report;
  }
  if (options.rank >= 0 && !report.problems.empty()) {
    // Another rank's experts may be missing here.
    CheckpointOptions only_rank = options.checkpoint;
    only_rank.experts = ExpertsOf(*placement, options.rank);
    report.problems = Problems();
    report.checkpoint = Checkpoint::Examine(dir, only_rank, &report.problems);
  }
  if (!report.problems.empty()) return report;

  const int32_t first_rank = std::max(options.rank, 0);
  const int32_t num_ranks = options.rank >= 0 ? 1 : options.num_ranks;
  report.ranks = SharesOf(report.checkpoint,
                          MakeLoadPlan(report.checkpoint, *placement, first_rank, num_ranks),
                          first_rank, num_ranks);
  if (options.verify) {
    std::vector<int32_t> experts;
    for (const RankShare& share : report.ranks) {
      experts.insert(experts.end(), share.experts.begin(), share.experts.end());
    }
    report.scales = VerifyScales(report.checkpoint, experts, &report.problems);
    report.verified = true;
  }
  if (report.problems.empty()) report.backends = Backends(spec);
  return report;
}

}  // namespace expertd
