#include "tests/kernels/cuda/simt/layer_steps.h"

#include <gtest/gtest.h>

#include <utility>

#include "kernels/reference/reference.h"

namespace expertd::simt {
namespace {

constexpr double kBound = 5e-3;  // as on a GPU

}  // namespace

LayerSpec Spec(int64_t hidden, int64_t intermediate, int32_t experts, Recipe recipe) {
  return {.hidden_size = hidden,
          .intermediate_size = intermediate,
          .num_experts = experts,
          .top_k = 3,
          .recipe = recipe,
          .swiglu_limit = 1.0f};
}

Placement PlacementOf(int32_t experts, int32_t ranks, int32_t slots) {
  auto placement = slots == 0 ? Placement::Contiguous(experts, ranks)
                              : Placement::Redundant(experts, ranks, slots);
  EXPECT_TRUE(placement.ok()) << placement.status();
  return *std::move(placement);
}

RankLayer::Batches Batches(const LayerSpec& spec, const std::vector<int32_t>& tokens, int32_t top_k,
                           testing::Routing routing, uint64_t seed) {
  RankLayer::Batches batches;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    batches.push_back(
        testing::MakeRandomBatch(spec, tokens[rank], top_k, routing, seed * 100 + rank));
  }
  return batches;
}

void ExpectRight(const testing::HostLayer& layer, const RankLayer::Batches& batches,
                 const std::vector<std::vector<float>>& outputs) {
  for (size_t rank = 0; rank < batches.size(); ++rank) {
    if (batches[rank].num_tokens == 0) continue;
    EXPECT_LT(reference::RelL2(outputs[rank], testing::ReferenceRows(layer, batches[rank])), kBound)
        << "rank " << rank;
  }
}

void ExpectRightSteps(const testing::HostLayer& layer, const Placement& placement,
                      const RankLayer::Options& options,
                      const std::vector<RankLayer::Batches>& steps) {
  RankLayer run(layer, placement, options);
  const auto outputs = run.Run(steps);
  ASSERT_EQ(run.error(), "");
  for (size_t s = 0; s < steps.size(); ++s) {
    SCOPED_TRACE(s);
    ExpectRight(layer, steps[s], outputs[s]);
  }
}

}  // namespace expertd::simt
