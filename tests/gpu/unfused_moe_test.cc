#include "kernels/cuda/unfused_moe.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
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

// The oracle must stay usable at real sizes: the bound is generous, a hundred times the fused
// kernel.
TEST_F(UnfusedMoeTest, AFullLayerOfManyTokensTakesUnderTwoSeconds) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(7168, 3072, 8, Recipe::kMxfp4, 10.0f), 8);
  const HostBatch batch = testing::MakeRandomBatch(layer.spec, 8192, 6, Routing::kUniform, 10);
  const testing::PackedOnDevice packed(layer);
  const DevicePlacement placement(8);
  const DeviceBatch device_batch(batch, layer.spec.hidden_size, DType::kF32);
  const DeviceArray<uint8_t> workspace(cuda::UnfusedWorkspaceBytes(layer.spec, 8, 8192, 6));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const absl::Time start = absl::Now();
  ASSERT_TRUE(cuda::LaunchUnfusedMoe(layer.spec, 8, packed.view(), placement.view(),
                                     device_batch.step(), workspace.data(), nullptr)
                  .ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const absl::Duration elapsed = absl::Now() - start;
  RecordProperty("milliseconds", static_cast<int>(absl::ToInt64Milliseconds(elapsed)));
  std::printf("pro geometry, T 8192, K 6: %.0f ms\n", absl::ToDoubleMilliseconds(elapsed));
  EXPECT_LT(elapsed, absl::Seconds(2));

  const std::vector<int32_t> rows = testing::SpreadRows(8192, 4);
  const std::vector<double> expected =
      testing::ReferenceRows(layer, testing::SelectRows(batch, 7168, rows));
  const std::vector<float> output = device_batch.Output();
  std::vector<float> chosen;
  for (const int32_t row : rows) {
    chosen.insert(chosen.end(), output.begin() + row * 7168, output.begin() + (row + 1) * 7168);
  }
  EXPECT_LT(reference::RelL2(chosen, expected), kF32Bound);
}

TEST_F(UnfusedMoeTest, SmallShapesTouchOnlyTheirMemory) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const HostLayer layer = testing::MakeRandomLayer(Spec(64, 192, 3, recipe, 1.0f), 6);
    const HostBatch batch = testing::MakeRandomBatch(layer.spec, 70, 2, Routing::kMasked, 7);
    const std::vector<float> output = Run(layer, batch, DType::kBf16);
    EXPECT_LT(reference::RelL2(output, testing::ReferenceRows(layer, batch)), kBf16OutputBound);
  }
}

TEST_F(UnfusedMoeTest, ARowsBitsDoNotDependOnTheBatch) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(320, 192, 8, Recipe::kMxfp4, 10.0f), 4);
  const HostBatch batch = testing::MakeRandomBatch(layer.spec, 150, 6, Routing::kSkewed, 9);
  const std::vector<float> whole = Run(layer, batch, DType::kF32);
  EXPECT_EQ(testing::FirstDifference(whole, Run(layer, batch, DType::kF32)), -1);
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
