#include "kernels/cuda/pack_weights.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/unfused_moe.h"
#include "kernels/layout/pack_host.h"
#include "kernels/reference/reference.h"
#include "tests/gpu/testing/device.h"
#include "tests/gpu/testing/moe_cases.h"

namespace expertd {
namespace {

using testing::DeviceArray;
using testing::DeviceBatch;
using testing::DeviceLayer;
using testing::DevicePlacement;
using testing::FirstDifference;
using testing::HostBatch;
using testing::HostLayer;
using testing::PackedOnDevice;
using testing::Routing;

struct Case {
  int64_t hidden;
  int64_t intermediate;
  Recipe recipe;
};

class PackWeightsTest : public testing::GpuTest {
 protected:
  static HostLayer MakeLayer(const Case& c, int32_t experts) {
    return testing::MakeRandomLayer({.hidden_size = c.hidden,
                                     .intermediate_size = c.intermediate,
                                     .num_experts = experts,
                                     .recipe = c.recipe,
                                     .swiglu_limit = 10},
                                    7);
  }
};

layout::CanonicalMatrix Canonical(const HostLayer& layer, int32_t expert, Matrix matrix) {
  const reference::MatrixView view = layer.View(expert, matrix);
  const MatrixShape shape = ShapeOf(layer.spec, matrix);
  return {view.codes.data(), view.scales.data(), static_cast<int>(shape.out),
          static_cast<int>(shape.in), static_cast<float>(view.second_level)};
}

std::string Describe(const Case& c) {
  return absl::StrCat(c.recipe == Recipe::kMxfp4 ? "mxfp4 " : "nvfp4 ", c.hidden, " x ",
                      c.intermediate);
}

// 2880 is not a multiple of 128, 192 and 64 leave narrow groups of tiles.
const std::vector<Case> kCases = {
    {256, 128, Recipe::kMxfp4},   {256, 128, Recipe::kNvfp4}, {64, 64, Recipe::kMxfp4},
    {64, 64, Recipe::kNvfp4},     {192, 320, Recipe::kMxfp4}, {320, 192, Recipe::kNvfp4},
    {2880, 2880, Recipe::kMxfp4}, {2880, 64, Recipe::kNvfp4},
};

TEST_F(PackWeightsTest, TheGpuPacksTheSameBytesAsTheHost) {
  for (const Case& c : kCases) {
    HostLayer layer = MakeLayer(c, 2);
    if (c.recipe == Recipe::kMxfp4) {  // one row needs a base, one spans 80 binades
      for (int m = 0; m < kNumMatrices; ++m) {
        layer.scales[m][0] = 127 + 50;
        layer.scales[m][1] = 127 - 30;
      }
    }
    const layout::PackedMatrix fc1 = cuda::PackedFc1(layer.spec);
    const layout::PackedMatrix fc2 = cuda::PackedFc2(layer.spec);
    std::vector<uint8_t> fc1_units(2 * fc1.slot_bytes());
    std::vector<uint8_t> fc2_units(2 * fc2.slot_bytes());
    std::vector<float> fc1_factors(2 * fc1.scales_per_slot());
    std::vector<float> fc2_factors(2 * fc2.scales_per_slot());
    for (int32_t e = 0; e < 2; ++e) {
      uint8_t* units = fc1_units.data() + e * fc1.slot_bytes();
      float* factors = fc1_factors.data() + e * fc1.scales_per_slot();
      layout::PackMatrix(fc1, layout::Rows::kGate, Canonical(layer, e, Matrix::kGate), units,
                         factors);
      layout::PackMatrix(fc1, layout::Rows::kUp, Canonical(layer, e, Matrix::kUp), units, factors);
      layout::PackMatrix(fc2, layout::Rows::kAll, Canonical(layer, e, Matrix::kDown),
                         fc2_units.data() + e * fc2.slot_bytes(),
                         fc2_factors.data() + e * fc2.scales_per_slot());
    }
    const PackedOnDevice packed(layer);
    EXPECT_EQ(FirstDifference(packed.Fc1Units(), fc1_units), -1) << Describe(c);
    EXPECT_EQ(FirstDifference(packed.Fc2Units(), fc2_units), -1) << Describe(c);
    EXPECT_EQ(FirstDifference(packed.Fc1Factors(), fc1_factors), -1) << Describe(c);
    EXPECT_EQ(FirstDifference(packed.Fc2Factors(), fc2_factors), -1) << Describe(c);
  }
}

TEST_F(PackWeightsTest, EveryPackedValueIsTheFilesValue) {
  for (const Case& c : kCases) {
    if (c.hidden * c.intermediate > 1 << 18) continue;  // the small ones have every corner
    const HostLayer layer = MakeLayer(c, 1);
    const PackedOnDevice packed(layer);
    const std::vector<uint8_t> fc1_units = packed.Fc1Units();
    const std::vector<uint8_t> fc2_units = packed.Fc2Units();
    const std::vector<float> fc1_factors = packed.Fc1Factors();
    const std::vector<float> fc2_factors = packed.Fc2Factors();
    int64_t wrong = 0;
    for (const Matrix matrix : {Matrix::kGate, Matrix::kUp, Matrix::kDown}) {
      const MatrixShape shape = ShapeOf(layer.spec, matrix);
      const bool down = matrix == Matrix::kDown;
      const layout::Rows rows = down                      ? layout::Rows::kAll
                                : matrix == Matrix::kGate ? layout::Rows::kGate
                                                          : layout::Rows::kUp;
      for (int row = 0; row < shape.out; ++row) {
        for (int col = 0; col < shape.in; ++col) {
          const double value = layout::UnpackWeight(
              down ? cuda::PackedFc2(layer.spec) : cuda::PackedFc1(layer.spec),
              down ? fc2_units.data() : fc1_units.data(),
              down ? fc2_factors.data() : fc1_factors.data(), layout::PackedRow(rows, row), col);
          wrong += value != reference::Dequantise(layer.View(0, matrix), c.recipe, shape, row, col);
        }
      }
    }
    EXPECT_EQ(wrong, 0) << Describe(c);
  }
}

TEST_F(PackWeightsTest, ThePlainPathGivesTheSameBitsFromPackedAndFromCanonicalWeights) {
  for (const Case& c : kCases) {
    const HostLayer layer = MakeLayer(c, 4);
    const HostBatch batch = testing::MakeRandomBatch(layer.spec, 90, 3, Routing::kMasked, 11);
    const DevicePlacement placement(4);
    const DeviceArray<uint8_t> workspace(cuda::UnfusedWorkspaceBytes(layer.spec, 4, 90, 3));
    DeviceBatch from_canonical(batch, c.hidden, DType::kF32);
    DeviceBatch from_packed(batch, c.hidden, DType::kF32);
    const DeviceLayer canonical(layer);
    const PackedOnDevice packed(layer);
    ASSERT_TRUE(cuda::LaunchUnfusedMoe(layer.spec, 4, canonical.view(), placement.view(),
                                       from_canonical.step(), workspace.data(), nullptr)
                    .ok());
    ASSERT_TRUE(cuda::LaunchUnfusedMoe(layer.spec, 4, packed.view(), placement.view(),
                                       from_packed.step(), workspace.data(), nullptr)
                    .ok());
    EXPECT_EQ(FirstDifference(from_canonical.OutputBytes(), from_packed.OutputBytes()), -1)
        << Describe(c);
  }
}

TEST_F(PackWeightsTest, SmallShapesTouchOnlyTheirMemory) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const HostLayer layer = MakeLayer({192, 64, recipe}, 2);
    const PackedOnDevice packed(layer);
    const HostBatch batch = testing::MakeRandomBatch(layer.spec, 5, 3, Routing::kSkewed, 8);
    const DevicePlacement placement(2);
    const DeviceArray<uint8_t> workspace(cuda::UnfusedWorkspaceBytes(layer.spec, 2, 5, 3));
    const DeviceBatch device_batch(batch, layer.spec.hidden_size, DType::kF32);
    ASSERT_TRUE(cuda::LaunchUnfusedMoe(layer.spec, 2, packed.view(), placement.view(),
                                       device_batch.step(), workspace.data(), nullptr)
                    .ok());
    EXPECT_LT(reference::RelL2(device_batch.Output(), testing::ReferenceRows(layer, batch)), 5e-6);
  }
}

}  // namespace
}  // namespace expertd
