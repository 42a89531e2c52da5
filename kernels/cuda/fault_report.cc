#include "kernels/cuda/fault_report.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

using moe_layer::FaultRecord;

bool IsPeerWait(const RankResult& result) {
  return result.fault.peer != static_cast<uint32_t>(result.rank) &&
         (result.fault.code == moe_layer::kWaitRoutes ||
          result.fault.code == moe_layer::kWaitTokens ||
          result.fault.code == moe_layer::kWaitPartials);
}

// The smaller, the nearer to the cause.
int Distance(const RankResult& result) {
  if (IsFatal(result.status)) return 0;
  if (!result.status.ok()) return 1;
  switch (result.fault.code) {
    case moe_layer::kWaitPipeline:
      return 2;
    case moe_layer::kWaitSort:
      return 3;
    case moe_layer::kWaitRoutes:
      return 4;
    case moe_layer::kWaitTokens:
      return 5;
    case moe_layer::kWaitFc1:
      return 6;
    case moe_layer::kWaitFc2:
      return 7;
    case moe_layer::kWaitPartials:
      return 8;
    default:
      return 9;
  }
}

std::string WhatWasWaitedFor(const FaultRecord& fault) {
  switch (fault.code) {
    case moe_layer::kWaitFc1:
      return absl::StrCat("an FC2 tile waited for the intermediate of token tile ", fault.tile);
    case moe_layer::kWaitFc2:
      return "combine waited for this rank's expert outputs";
    case moe_layer::kWaitPipeline:
      return absl::StrCat("a wait inside a CTA did not end, tile ", fault.tile);
    case moe_layer::kStopped:
      return "it was told to stop";
    case moe_layer::kWaitRoutes:
      return fault.tile == 0
                 ? "routing waited for the peer's number of routes"
                 : absl::StrCat("routing waited for route ", fault.tile - 1, " of the peer");
    case moe_layer::kWaitSort:
      return absl::StrCat("the sort of the routes waited for CTA ", fault.tile);
    case moe_layer::kWaitTokens:
      return absl::StrCat("an FC1 tile waited for row ", fault.tile, " of rank ", fault.peer);
    case moe_layer::kWaitPartials:
      return absl::StrCat("combine waited for the peer's partial row of token ", fault.tile);
    default:
      return absl::StrCat("unknown fault code ", fault.code);
  }
}

std::string Details(const FaultRecord& fault) {
  return absl::StrCat(WhatWasWaitedFor(fault), " (kernel step ", fault.step, ", CTA ", fault.cta,
                      ", found ", fault.found, ", expected ", fault.expected, ", waited ",
                      fault.waited_us, " us)");
}

std::string RankName(int32_t rank, bool several) {
  return several ? absl::StrCat("rank ", rank) : "the GPU";
}

absl::Status Describe(const RankResult& result, bool several) {
  if (!result.status.ok()) {
    if (!several) return result.status;
    const absl::Status named(result.status.code(),
                             absl::StrCat("rank ", result.rank, ": ", result.status.message()));
    return IsFatal(result.status) ? MarkFatal(named) : named;
  }
  const FaultRecord& fault = result.fault;
  if (!IsPeerWait(result)) {
    return absl::DeadlineExceededError(
        absl::StrCat(RankName(result.rank, several), " gave the step up: ", Details(fault)));
  }
  return absl::UnavailableError(absl::StrCat("rank ", fault.peer, " did not answer in ",
                                             fault.waited_us / 1000, " ms: on rank ", result.rank,
                                             " ", Details(fault)));
}

}  // namespace

absl::Status DescribeFailure(absl::Span<const RankResult> results) {
  std::vector<const RankResult*> failed;
  for (const RankResult& result : results) {
    if (Failed(result)) failed.push_back(&result);
  }
  if (failed.empty()) return absl::OkStatus();
  std::stable_sort(failed.begin(), failed.end(), [](const RankResult* a, const RankResult* b) {
    return Distance(*a) < Distance(*b);
  });
  const bool several = results.size() > 1;
  const absl::Status first = Describe(*failed[0], several);
  std::string text(first.message());
  for (size_t i = 1; i < failed.size(); ++i) {
    // That the others were told to stop says nothing, nor that they failed alike.
    if (failed[i]->status.ok() && failed[i]->fault.code == moe_layer::kStopped) continue;
    if (!failed[i]->status.ok() && failed[i]->status == failed[0]->status) continue;
    absl::StrAppend(&text, "; ", Describe(*failed[i], several).message());
  }
  const absl::Status status(first.code(), text);
  return IsFatal(first) ? MarkFatal(status) : status;
}

}  // namespace expertd::cuda
