#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/moe_layer/params.h"

// What the ranks' ends of one step come to: pure.
namespace expertd::cuda {

// How one rank ended a step.
struct RankResult {
  int32_t rank = 0;
  absl::Status status;                // of the host's calls
  moe_layer::FaultRecord fault = {};  // code kNoFault: none
};

inline bool Failed(const RankResult& result) {
  return !result.status.ok() || result.fault.code != moe_layer::kNoFault;
}

// OK if no rank failed. Otherwise what began it, and what the other ranks say: an error of the
// host, a fatal one first; a wait within a rank; a wait for a peer, in the order in which rows flow
// (ids, rows, partial rows), because who waits for what never came makes others wait in turn; the
// stop word last. UNAVAILABLE for a peer that did not answer, DEADLINE_EXCEEDED for a wait within a
// rank. With one rank nothing names it.
absl::Status DescribeFailure(absl::Span<const RankResult> results);

}  // namespace expertd::cuda
