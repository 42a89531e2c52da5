#include "kernels/cpu/fp4_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/formats.h"
#include "kernels/reference/reference.h"

namespace expertd::cpu {
namespace {

// A random matrix whose scale bytes cover everything finite, and tokens to multiply it with.
struct Example {
  Example(Recipe recipe, int64_t out, int64_t in, int64_t max_tokens) : out(out), in(in) {
    std::mt19937_64 random(out * 7 + in);
    codes.resize(out * in / 2);
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
    scales.resize(out * in / ScaleGroup(recipe));
    for (uint8_t& scale : scales) {
      scale = static_cast<uint8_t>(recipe == Recipe::kMxfp4 ? 110 + random() % 24 : random() % 127);
      if (recipe == Recipe::kNvfp4 && random() % 8 == 0) scale |= 0x80;  // legal, unheard of
    }
    codes.resize(codes.size() + kReadPadding);
    scales.resize(scales.size() + kReadPadding);
    std::normal_distribution<float> normal;
    values.resize(max_tokens * in);
    for (float& value : values) value = normal(random);
    for (int64_t n = 0; n < max_tokens; ++n) x.push_back(&values[n * in]);
    matrix = {codes.data(), scales.data(), in, recipe, 0.375f};
  }

  std::vector<float> Run(int64_t first, int64_t num_tokens) {
    std::vector<float> result(num_tokens * out, NAN);
    GemmTask task;
    task.matrix = matrix;
    task.row_end = out;
    task.x = x.data() + first;
    task.num_tokens = num_tokens;
    task.out = result.data();
    task.out_stride = out;
    task.scratch = scratch;
    Fp4Gemm(task);
    return result;
  }

  std::vector<double> Truth(int64_t num_tokens) const {
    const auto unpadded = [](const std::vector<uint8_t>& bytes) {
      return absl::MakeConstSpan(bytes).subspan(0, bytes.size() - kReadPadding);
    };
    const reference::MatrixView view{unpadded(codes), unpadded(scales), matrix.second_level};
    std::vector<double> result(num_tokens * out);
    for (int64_t row = 0; row < out; ++row) {
      for (int64_t k = 0; k < in; ++k) {
        const double weight = reference::Dequantise(view, matrix.recipe, {out, in}, row, k);
        for (int64_t n = 0; n < num_tokens; ++n) result[n * out + row] += weight * x[n][k];
      }
    }
    return result;
  }

  int64_t out, in;
  std::vector<uint8_t> codes, scales;
  std::vector<float> values;
  std::vector<const float*> x;
  Fp4Matrix matrix;
  alignas(64) float scratch[kGemmScratchFloats];
};

bool SameBits(const float* a, const float* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

class Fp4GemmTest : public ::testing::TestWithParam<Recipe> {
 protected:
  void TearDown() override { ForceInstructionSetForTest(""); }
};

TEST_P(Fp4GemmTest, EveryInstructionSetMultipliesRight) {
  for (const int64_t in : {32, 64, 96, 128, 160, 256, 288, 544}) {
    Example example(GetParam(), 96, in, 20);
    const std::vector<double> truth = example.Truth(20);
    for (const std::string& name : InstructionSets()) {
      ForceInstructionSetForTest(name);
      for (const int64_t num_tokens : {1, 2, 3, 4, 5, 8, 9, 13, 20}) {
        const std::vector<float> result = example.Run(0, num_tokens);
        const std::vector<double> expected(truth.begin(), truth.begin() + num_tokens * 96);
        EXPECT_LT(reference::RelL2(result, expected), 2e-6)
            << name << ", in " << in << ", " << num_tokens << " tokens";
      }
    }
  }
}

TEST_P(Fp4GemmTest, ARowOfATokenHasTheSameBitsInEveryBatch) {
  Example example(GetParam(), 64, 352, 40);
  for (const std::string& name : InstructionSets()) {
    ForceInstructionSetForTest(name);
    const std::vector<float> whole = example.Run(0, 40);
    for (int64_t size = 1; size <= 20; ++size) {
      for (int64_t first = 0; first + size <= 40; first += 7) {
        const std::vector<float> part = example.Run(first, size);
        EXPECT_TRUE(SameBits(part.data(), &whole[first * 64], part.size()))
            << name << ", tokens " << first << " + " << size;
      }
    }
  }
}

// Lanes are rows, so a wider vector changes nothing; only a fused multiply-add rounds differently
// from two instructions.
TEST_P(Fp4GemmTest, InstructionSetsWithFusedMultiplyAddGiveTheSameBits) {
  Example example(GetParam(), 64, 416, 11);
  std::vector<std::vector<float>> results;
  for (const std::string& name : InstructionSets()) {
    if (name == "SSE4" || name == "SSSE3") continue;
    ForceInstructionSetForTest(name);
    results.push_back(example.Run(0, 11));
    EXPECT_TRUE(SameBits(results.back().data(), results.front().data(), results.front().size()))
        << name;
  }
}

TEST_P(Fp4GemmTest, ASubrangeOfRowsIsTheSameRows) {
  Example example(GetParam(), 128, 96, 3);
  const std::vector<float> whole = example.Run(0, 3);
  std::vector<float> part(3 * 32);
  GemmTask task;
  task.matrix = example.matrix;
  task.row_begin = 64;
  task.row_end = 96;
  task.x = example.x.data();
  task.num_tokens = 3;
  task.out = part.data();
  task.out_stride = 32;
  task.scratch = example.scratch;
  Fp4Gemm(task);
  for (int64_t n = 0; n < 3; ++n) {
    EXPECT_TRUE(SameBits(&part[n * 32], &whole[n * 128 + 64], 32));
  }
}

TEST_P(Fp4GemmTest, EveryCodeUnderEveryScaleIsExact) {
  const int64_t group = ScaleGroup(GetParam());
  for (const std::string& name : InstructionSets()) {
    ForceInstructionSetForTest(name);
    for (int byte = 0; byte < 255; ++byte) {
      const bool nan = GetParam() == Recipe::kNvfp4 && (byte & 0x7f) == 0x7f;
      // The loader refuses non-zero blocks outside 2^-100..2^60.
      if (nan || (GetParam() == Recipe::kMxfp4 && (byte < 27 || byte > 187))) continue;
      // Row r holds code r mod 16 at k = r, zero elsewhere; all scales are `byte`.
      Example example(GetParam(), 32, 32, 1);
      std::fill(example.codes.begin(), example.codes.end(), 0);
      std::fill(example.scales.begin(), example.scales.end(), static_cast<uint8_t>(byte));
      for (int64_t row = 0; row < 32; ++row) {
        example.codes[row * 16 + row / 2] = static_cast<uint8_t>((row % 16) << (4 * (row % 2)));
      }
      example.matrix.second_level = 1;
      std::fill(example.values.begin(), example.values.end(), 1.0f);
      const std::vector<float> result = example.Run(0, 1);
      const float scale = group == 32 ? DecodeUe8m0(byte) : DecodeE4m3(byte);
      for (int64_t row = 0; row < 32; ++row) {
        EXPECT_EQ(result[row], kE2m1Values[row % 16] * scale)
            << name << ", scale byte " << byte << ", code " << row % 16;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Fp4GemmTest, ::testing::Values(Recipe::kMxfp4, Recipe::kNvfp4),
                         [](const auto& info) { return std::string(RecipeName(info.param)); });

TEST(SwiGlu, ClampsTheGateAboveAndTheValueOnBothSides) {
  const std::vector<float> gate = {-50.0f, -1.0f, 0.0f, 1.0f, 12.0f};
  const std::vector<float> up = {-20.0f, 3.0f, 5.0f, 20.0f, 0.5f};
  std::vector<float> h(5);
  SwiGlu(gate.data(), up.data(), 10.0f, 5, h.data());
  const auto silu = [](double g) { return g / (1 + std::exp(-g)); };
  EXPECT_NEAR(h[0], silu(-50) * -10, 1e-20);
  EXPECT_NEAR(h[1], silu(-1) * 3, 1e-6);
  EXPECT_EQ(h[2], 0);
  EXPECT_NEAR(h[3], silu(1) * 10, 1e-5);
  EXPECT_NEAR(h[4], silu(10) * 0.5, 1e-5);
  SwiGlu(gate.data(), up.data(), 0.0f, 5, h.data());
  EXPECT_NEAR(h[4], silu(12) * 0.5, 1e-5);
  EXPECT_NEAR(h[3], silu(1) * 20, 1e-5);
}

TEST(SwiGlu, AVeryNegativeGateIsZeroNotNan) {
  const float gate = -200.0f, up = 1.0f;
  float h = 1;
  SwiGlu(&gate, &up, 0, 1, &h);
  EXPECT_EQ(h, 0.0f);
}

}  // namespace
}  // namespace expertd::cpu
