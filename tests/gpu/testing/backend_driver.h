#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "tests/gpu/testing/moe_cases.h"

namespace expertd::testing {

// Feeds the layers to the backend's sink, rank by rank and slot by slot as the placement says, and
// finishes it.
absl::Status LoadLayers(absl::Span<const HostLayer> layers, const Placement& placement,
                        WeightSink& sink);

// Rows of the batch that each rank gets, in order; empty: spread evenly.
using Spread = std::vector<int32_t>;

// A batch as a step of its own, on the backend's memory. Outputs are poisoned first.
struct StepOutput {
  std::vector<float> values;   // [T, H]
  std::vector<uint8_t> bytes;  // the same as it came
  StepTiming timing;
};
absl::StatusOr<StepOutput> RunStep(Backend& backend, const LayerSpec& spec, const HostBatch& batch,
                                   DType input = DType::kBf16, DType output = DType::kBf16,
                                   const Spread& spread = {});

// The answers of every layer for every routing, input and output dtype against the double
// reference: the largest relative error and whose it is.
struct WorstAnswer {
  double error = 0;
  std::string what;
};
absl::StatusOr<WorstAnswer> WorstOfEveryDtypeAndRouting(Backend& backend,
                                                        absl::Span<const HostLayer> layers);

// Fills a step from the batch; `memory` is the backend's.
MoeStep FillStep(const StepMemory& memory, const LayerSpec& spec, const HostBatch& batch,
                 DType input, DType output, const Spread& spread = {});

// The step's output rows in the batch's order.
std::vector<uint8_t> OutputBytes(const MoeStep& step, int64_t hidden_size);

}  // namespace expertd::testing
