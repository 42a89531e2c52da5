#include "loader/inspect.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/cluster_spec.h"
#include "loader/load_plan.h"
#include "loader/verify.h"

namespace expertd {
namespace {

constexpr int64_t kCudaGeometryMultiple = 64;  // of H and I: one tile of the kernel

RankShare ShareOf(const Checkpoint& checkpoint, const Placement& placement, int32_t rank) {
  const LoadPlan plan = MakeLoadPlan(checkpoint, placement, rank, 1);
  RankShare share{
      .rank = rank, .matrices = static_cast<int64_t>(plan.reads.size()), .bytes = plan.total_bytes};
  std::set<int32_t> experts, files;
  for (const PlannedRead& read : plan.reads) {
    experts.insert(read.expert);
    for (const FileRange* range :
         {&read.location.codes, &read.location.scales, &read.location.second_level}) {
      if (range->file >= 0) files.insert(range->file);
    }
  }
  share.experts.assign(experts.begin(), experts.end());
  for (const int32_t file : files) {
    share.files.push_back(checkpoint.files()[static_cast<size_t>(file)].path.filename().string());
  }
  return share;
}

std::vector<BackendVerdict> Backends(const LayerSpec& spec) {
  std::vector<BackendVerdict> backends = {
      {.backend = "cpu", .architecture = "any", .can_serve = true}};
  BackendVerdict cuda{.backend = "cuda", .architecture = "sm_90a", .can_serve = true};
  for (const auto& [name, size] : {std::pair{"hidden_size", spec.hidden_size},
                                   std::pair{"moe_intermediate_size", spec.intermediate_size}}) {
    if (size % kCudaGeometryMultiple == 0) continue;
    cuda.can_serve = false;
    absl::StrAppend(&cuda.reason, cuda.reason.empty() ? "" : "; ", name, ": found ", size,
                    ", expected a multiple of ", kCudaGeometryMultiple);
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
  report.backends = Backends(spec);
  if (!report.problems.empty()) return report;

  std::vector<int32_t> experts;
  for (int32_t rank = 0; rank < options.num_ranks; ++rank) {
    if (options.rank >= 0 && rank != options.rank) continue;
    report.ranks.push_back(ShareOf(report.checkpoint, *placement, rank));
    experts.insert(experts.end(), report.ranks.back().experts.begin(),
                   report.ranks.back().experts.end());
  }
  if (options.verify) {
    report.scales = VerifyScales(report.checkpoint, experts, &report.problems);
    report.verified = true;
  }
  return report;
}

}  // namespace expertd
