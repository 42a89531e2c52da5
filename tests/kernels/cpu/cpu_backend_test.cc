#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "tests/kernels/cpu/cpu_fixture.h"

namespace expertd::testing {
namespace {

// Sums in f32 against sums in double; bf16 outputs add their own rounding.
constexpr double kF32Bound = 5e-6;
constexpr double kBf16Bound = 5e-3;

Placement Contiguous(int32_t num_experts, int32_t num_ranks) {
  return *Placement::Contiguous(num_experts, num_ranks);
}

struct Shape {
  int64_t hidden_size;
  int64_t intermediate_size;
};

class CpuBackendShapes : public ::testing::TestWithParam<std::tuple<Recipe, Shape>> {};

TEST_P(CpuBackendShapes, AgreesWithTheReferenceForEveryTokenCount) {
  const auto [recipe, shape] = GetParam();
  const LayerSpec spec = MakeSpec(recipe, shape.hidden_size, shape.intermediate_size, 5);
  const RandomExperts experts(spec, 1);
  const auto backend = MakeLoaded(experts, Contiguous(5, 2), 160);
  ASSERT_NE(backend, nullptr);
  uint64_t step = 0;
  for (const int32_t num_tokens : {0, 1, 2, 3, 7, 8, 16, 17, 63, 64, 65, 257}) {
    if (num_tokens * shape.hidden_size > 70'000) continue;  // the reference takes too long
    const int32_t top_k = 1 + static_cast<int32_t>(step % 8);
    const Rows rows = RandomRows(spec, num_tokens, top_k, 100 + step);
    const auto output = RunStep(*backend, spec, rows, {.step = step++});
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), kF32Bound)
        << num_tokens << " tokens, top_k " << top_k;
  }
}

std::string ShapeName(const ::testing::TestParamInfo<CpuBackendShapes::ParamType>& info) {
  const auto& [recipe, shape] = info.param;
  return std::string(RecipeName(recipe)) + "_" + std::to_string(shape.hidden_size) + "_" +
         std::to_string(shape.intermediate_size);
}

INSTANTIATE_TEST_SUITE_P(Geometries, CpuBackendShapes,
                         ::testing::Combine(::testing::Values(Recipe::kMxfp4, Recipe::kNvfp4),
                                            ::testing::Values(Shape{64, 32}, Shape{96, 160},
                                                              Shape{32, 32}, Shape{256, 128})),
                         ShapeName);

}  // namespace
}  // namespace expertd::testing
