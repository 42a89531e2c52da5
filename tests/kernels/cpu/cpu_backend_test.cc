#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cpu/fp4_gemm.h"
#include "tests/kernels/cpu/cpu_fixture.h"

// What the CPU backend answers, against the reference in double.
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
    if (num_tokens * shape.hidden_size > 70'000) continue;  // the reference would take too long
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
                                            ::testing::Values(Shape{32, 32}, Shape{64, 32},
                                                              Shape{96, 160}, Shape{160, 96},
                                                              Shape{256, 128})),
                         ShapeName);

TEST(CpuBackend, AnswersAGeometryThatIsNoMultipleOf128) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const LayerSpec spec = MakeSpec(recipe, 2880, 2880, 2);
    const RandomExperts experts(spec, 2);
    const auto backend = MakeLoaded(experts, Contiguous(2, 1), 4);
    const Rows rows = RandomRows(spec, 2, 2, 3);
    const auto output = RunStep(*backend, spec, rows);
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), kF32Bound);
  }
}

TEST(CpuBackend, TakesAndGivesBothElementTypes) {
  const LayerSpec spec = MakeSpec(Recipe::kNvfp4, 128, 64, 4);
  const RandomExperts experts(spec, 4);
  const auto backend = MakeLoaded(experts, Contiguous(4, 2), 16);
  const Rows rows = RandomRows(spec, 9, 3, 5);
  const std::vector<double> expected = Expected(experts, rows);
  uint64_t step = 0;
  std::vector<std::vector<float>> outputs;
  for (const DType input : {DType::kBf16, DType::kF32}) {
    for (const DType output_dtype : {DType::kBf16, DType::kF32}) {
      const auto output =
          RunStep(*backend, spec, rows,
                  {.input_dtype = input, .output_dtype = output_dtype, .step = step++});
      ASSERT_TRUE(output.ok()) << output.status();
      EXPECT_LT(reference::RelL2(*output, expected),
                output_dtype == DType::kF32 ? kF32Bound : kBf16Bound);
      outputs.push_back(*output);
    }
  }
  EXPECT_TRUE(SameBits(outputs[0], outputs[2]));  // the rows are representable in bf16
  EXPECT_TRUE(SameBits(outputs[1], outputs[3]));
}

TEST(CpuBackend, WithoutALimitNothingIsClamped) {
  LayerSpec spec = MakeSpec(Recipe::kMxfp4, 64, 64, 2);
  spec.swiglu_limit = 0;
  const RandomExperts experts(spec, 6);
  const auto backend = MakeLoaded(experts, Contiguous(2, 1), 8);
  const Rows rows = RandomRows(spec, 8, 2, 7);
  const auto output = RunStep(*backend, spec, rows);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), kF32Bound);
  LayerSpec clamped = spec;
  clamped.swiglu_limit = 1.5f;
  const std::vector<double> other = reference::Forward(
      clamped, experts.Views(), std::vector<double>(rows.hidden.begin(), rows.hidden.end()),
      rows.ids, rows.weights, rows.top_k);
  EXPECT_GT(reference::RelL2(*output, other), 0.01);  // the limit would have mattered
}

TEST(CpuBackend, AllRoutesToOneExpertAndDuplicatesInARowAreSummed) {
  const LayerSpec spec = MakeSpec(Recipe::kMxfp4, 96, 64, 8);
  const RandomExperts experts(spec, 8);
  const auto backend = MakeLoaded(experts, Contiguous(8, 4), 64);
  Rows rows = RandomRows(spec, 200, 4, 9);
  std::fill(rows.ids.begin(), rows.ids.end(), 5);
  const auto output = RunStep(*backend, spec, rows);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), kF32Bound);
}

TEST(CpuBackend, MaskedRoutesContributeNothingWhateverTheirWeight) {
  const LayerSpec spec = MakeSpec(Recipe::kNvfp4, 64, 96, 4);
  const RandomExperts experts(spec, 10);
  const auto backend = MakeLoaded(experts, Contiguous(4, 2), 16);
  Rows rows = RandomRows(spec, 12, 4, 11);
  for (size_t i = 0; i < rows.ids.size(); i += 3) {
    rows.ids[i] = -1;
    rows.weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
  const auto output = RunStep(*backend, spec, rows);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), kF32Bound);
}

TEST(CpuBackend, AFullyMaskedRowIsPositiveZero) {
  const LayerSpec spec = MakeSpec(Recipe::kMxfp4, 64, 32, 4);
  const RandomExperts experts(spec, 12);
  const auto backend = MakeLoaded(experts, Contiguous(4, 2), 16);
  Rows rows = RandomRows(spec, 3, 2, 13);
  rows.ids[2] = rows.ids[3] = -1;
  rows.weights[2] = -1.0f;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const auto output =
        RunStep(*backend, spec, rows,
                {.output_dtype = dtype, .step = static_cast<uint64_t>(dtype == DType::kBf16)});
    ASSERT_TRUE(output.ok()) << output.status();
    const std::vector<float> zeros(spec.hidden_size, 0.0f);
    EXPECT_TRUE(SameBits(absl::MakeConstSpan(*output).subspan(64, 64), zeros));
  }
}

TEST(CpuBackend, ANanWeightTouchesItsOwnRowAlone) {
  const LayerSpec spec = MakeSpec(Recipe::kMxfp4, 64, 32, 4);
  const RandomExperts experts(spec, 14);
  const auto backend = MakeLoaded(experts, Contiguous(4, 2), 16);
  Rows rows = RandomRows(spec, 20, 2, 15);
  const auto clean = RunStep(*backend, spec, rows, {.step = 0});
  rows.weights[7 * 2] = std::numeric_limits<float>::quiet_NaN();
  rows.hidden[11 * 64] = std::numeric_limits<float>::infinity();
  const auto output = RunStep(*backend, spec, rows, {.step = 1});
  ASSERT_TRUE(clean.ok() && output.ok());
  for (int32_t token = 0; token < 20; ++token) {
    const auto row = absl::MakeConstSpan(*output).subspan(token * 64, 64);
    if (token == 7) {
      for (const float value : row) EXPECT_TRUE(std::isnan(value));
    } else if (token != 11) {
      EXPECT_TRUE(SameBits(row, absl::MakeConstSpan(*clean).subspan(token * 64, 64))) << token;
    }
  }
}

TEST(CpuBackend, RanksWithoutTokensTakePart) {
  const LayerSpec spec = MakeSpec(Recipe::kMxfp4, 64, 32, 8);
  const RandomExperts experts(spec, 16);
  const auto backend = MakeLoaded(experts, Contiguous(8, 8), 32);
  uint64_t step = 0;
  for (const int32_t num_tokens : {0, 1, 5, 32}) {
    const Rows rows = RandomRows(spec, num_tokens, 8, 17);
    const auto output = RunStep(*backend, spec, rows, {.step = step++, .all_on_rank_zero = true});
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), kF32Bound);
  }
}

TEST(CpuBackend, AStepBeyondTheWorkspaceRunsInRounds) {
  const LayerSpec spec = MakeSpec(Recipe::kMxfp4, 32, 32, 4);
  const RandomExperts experts(spec, 18);
  const auto backend = MakeLoaded(experts, Contiguous(4, 2), 1200);
  const Rows rows = RandomRows(spec, 1200, 16, 19);  // 19200 routes, 8192 a round
  const auto output = RunStep(*backend, spec, rows, {.all_on_rank_zero = true});
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), kF32Bound);
}

TEST(CpuBackend, EveryInstructionSetAgreesWithTheReference) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const LayerSpec spec = MakeSpec(recipe, 160, 96, 3);
    const RandomExperts experts(spec, 20);
    const auto backend = MakeLoaded(experts, Contiguous(3, 1), 64);
    uint64_t step = 0;
    for (const std::string& name : cpu::InstructionSets()) {
      cpu::ForceInstructionSetForTest(name);
      EXPECT_EQ(cpu::InstructionSet(), name);
      for (const int32_t num_tokens : {1, 4, 33}) {
        const Rows rows = RandomRows(spec, num_tokens, 3, 21);
        const auto output = RunStep(*backend, spec, rows, {.step = step++});
        ASSERT_TRUE(output.ok()) << output.status();
        EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), kF32Bound)
            << name << ", " << num_tokens << " tokens";
      }
    }
    cpu::ForceInstructionSetForTest("");
  }
}

}  // namespace
}  // namespace expertd::testing
