#include "kernels/cuda/unfused_moe.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/reference/reference.h"
#include "tests/gpu/testing/device.h"
#include "tests/gpu/testing/moe_cases.h"

namespace expertd {
namespace {

using testing::DeviceArray;
using testing::DeviceBatch;
using testing::DeviceLayer;
using testing::DevicePlacement;
using testing::HostBatch;
using testing::HostLayer;
using testing::Routing;

// f32 sums of a few thousand terms and one rounding; nothing is rounded to BF16 in between.
constexpr double kF32Bound = 5e-6;
// The output's rounding alone: 2^-9 at most, 2^-9 / sqrt(3) on average.
constexpr double kBf16OutputBound = 2.5e-3;

class UnfusedMoeTest : public testing::GpuTest {
 protected:
  static std::vector<float> Run(const HostLayer& layer, const HostBatch& batch, DType output) {
    const DeviceLayer device_layer(layer);
    const DevicePlacement placement(layer.spec.num_experts);
    const DeviceBatch device_batch(batch, layer.spec.hidden_size, output);
    const DeviceArray<uint8_t> workspace(cuda::UnfusedWorkspaceBytes(
        layer.spec, layer.spec.num_experts, batch.num_tokens, batch.top_k));
    const absl::Status status =
        cuda::LaunchUnfusedMoe(layer.spec, layer.spec.num_experts, device_layer.view(),
                               placement.view(), device_batch.step(), workspace.data(), nullptr);
    EXPECT_TRUE(status.ok()) << status;
    return device_batch.Output();
  }
};

LayerSpec Spec(int64_t hidden, int64_t intermediate, int32_t experts, Recipe recipe, float limit) {
  return {.hidden_size = hidden,
          .intermediate_size = intermediate,
          .num_experts = experts,
          .recipe = recipe,
          .swiglu_limit = limit};
}

TEST_F(UnfusedMoeTest, AgreesWithTheReferenceForEveryRoutingAndRecipe) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const HostLayer layer = testing::MakeRandomLayer(Spec(192, 128, 6, recipe, 1.5f), 1);
    for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kOneExpert,
                                  Routing::kMasked, Routing::kAllMasked}) {
      for (const int32_t tokens : {0, 1, 7, 64, 65, 200}) {
        const HostBatch batch = testing::MakeRandomBatch(layer.spec, tokens, 4, routing, tokens);
        const std::vector<float> output = Run(layer, batch, DType::kF32);
        const double error = reference::RelL2(output, testing::ReferenceRows(layer, batch));
        EXPECT_LT(error, kF32Bound)
            << RecipeName(recipe) << ", " << testing::RoutingName(routing) << ", T = " << tokens;
      }
    }
  }
}

TEST_F(UnfusedMoeTest, AgreesWithTheReferenceAtOneFullExpertPair) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(7168, 3072, 2, Recipe::kMxfp4, 10.0f), 2);
  const HostBatch batch = testing::MakeRandomBatch(layer.spec, 3, 2, Routing::kUniform, 3);
  const std::vector<double> expected = testing::ReferenceRows(layer, batch);
  EXPECT_LT(reference::RelL2(Run(layer, batch, DType::kF32), expected), kF32Bound);
  EXPECT_LT(reference::RelL2(Run(layer, batch, DType::kBf16), expected), kBf16OutputBound);
}

TEST_F(UnfusedMoeTest, HandlesTheExtremesOfTopKAndExperts) {
  for (const auto& [experts, top_k] :
       std::vector<std::pair<int32_t, int32_t>>{{1, 1}, {1, 32}, {3, 32}, {1024, 1}, {1024, 32}}) {
    const HostLayer layer =
        testing::MakeRandomLayer(Spec(64, 64, experts, Recipe::kNvfp4, 0), experts);
    const HostBatch batch = testing::MakeRandomBatch(layer.spec, 33, top_k, Routing::kSkewed, 5);
    const double error =
        reference::RelL2(Run(layer, batch, DType::kF32), testing::ReferenceRows(layer, batch));
    EXPECT_LT(error, kF32Bound) << "E = " << experts << ", K = " << top_k;
  }
}

TEST_F(UnfusedMoeTest, ARowsBitsDoNotDependOnTheBatch) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(320, 192, 8, Recipe::kMxfp4, 10.0f), 4);
  const HostBatch batch = testing::MakeRandomBatch(layer.spec, 150, 6, Routing::kSkewed, 9);
  const std::vector<float> whole = Run(layer, batch, DType::kF32);
  EXPECT_EQ(whole, Run(layer, batch, DType::kF32));
  for (const int32_t row : {0, 77, 149}) {
    const HostBatch alone =
        testing::SelectRows(batch, layer.spec.hidden_size, absl::MakeConstSpan(&row, 1));
    const auto begin = whole.begin() + row * layer.spec.hidden_size;
    EXPECT_EQ(std::vector<float>(begin, begin + layer.spec.hidden_size),
              Run(layer, alone, DType::kF32));
  }
}

}  // namespace
}  // namespace expertd
