#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/golden_checkpoint.h"
#include "tests/testing/golden_vectors.h"

namespace expertd {
namespace {

using testing::GoldenCase;
using testing::GoldenCheckpoint;
using testing::GoldenRequest;
using testing::LoadGoldenCase;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double RelativeL2(const std::vector<double>& actual, const std::vector<double>& expected) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return error == 0 ? 0 : std::sqrt(error / norm);
}

std::vector<double> Answer(const GoldenCase& golden, const GoldenCheckpoint& checkpoint,
                           const GoldenRequest& request) {
  const LayerSpec spec = golden.Spec(request.layer);
  const auto experts = checkpoint.Layer(spec, golden.num_hidden_layers);
  return reference::Forward(spec, experts, request.HiddenAs<double>(), request.ids, request.weights,
                            request.top_k);
}

// Every case but gpt-oss, whose activation no served family has.
class GoldenReferenceTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenReferenceTest, AgreesWithTheGoldenAnswersTo1em12) {
  const GoldenCase golden = LoadGoldenCase(GetParam());
  ASSERT_TRUE(golden.plain_swiglu);
  const GoldenCheckpoint checkpoint(golden.checkpoint);
  for (const GoldenRequest& request : golden.requests) {
    SCOPED_TRACE(request.name);
    const std::vector<double> actual = Answer(golden, checkpoint, request);
    ASSERT_EQ(actual.size(), request.expected.size());
    EXPECT_LT(RelativeL2(actual, request.expected), 1e-12);
    // Single elements may cancel: their floor is the largest of their row.
    const size_t row_size = static_cast<size_t>(golden.hidden_size);
    for (size_t i = 0; i < actual.size(); ++i) {
      const auto row = request.expected.begin() + static_cast<ptrdiff_t>(i / row_size * row_size);
      const double largest =
          std::abs(*std::max_element(row, row + static_cast<ptrdiff_t>(row_size),
                                     [](double a, double b) { return std::abs(a) < std::abs(b); }));
      ASSERT_LE(std::abs(actual[i] - request.expected[i]), 1e-12 * largest) << "element " << i;
    }
  }
}

TEST_P(GoldenReferenceTest, AMaskedRowIsExactlyZero) {
  const GoldenCase golden = LoadGoldenCase(GetParam());
  const GoldenCheckpoint checkpoint(golden.checkpoint);
  int masked_rows = 0;
  for (const GoldenRequest& request : golden.requests) {
    const std::vector<double> actual = Answer(golden, checkpoint, request);
    for (int32_t t = 0; t < request.num_tokens; ++t) {
      const int32_t* ids = request.ids.data() + t * request.top_k;
      if (std::any_of(ids, ids + request.top_k, [](int32_t id) { return id != -1; })) continue;
      ++masked_rows;
      for (int64_t h = 0; h < golden.hidden_size; ++h) {
        ASSERT_EQ(actual[t * golden.hidden_size + h], 0.0) << request.name << " row " << t;
      }
    }
  }
  EXPECT_GE(masked_rows, 3);
}

TEST_P(GoldenReferenceTest, ARowDoesNotDependOnItsNeighbours) {
  const GoldenCase golden = LoadGoldenCase(GetParam());
  const GoldenCheckpoint checkpoint(golden.checkpoint);
  std::map<std::string, std::vector<double>> answers;
  for (const GoldenRequest& request : golden.requests) {
    answers[request.name] = Answer(golden, checkpoint, request);
  }
  int compared = 0;
  for (const GoldenRequest& request : golden.requests) {
    if (request.name.substr(request.name.find('-')) != "-t17") continue;
    const auto alone = answers.find(request.name.substr(0, request.name.find('-')) + "-t1");
    ASSERT_NE(alone, answers.end());
    const auto row9 = answers[request.name].begin() + 9 * golden.hidden_size;
    EXPECT_TRUE(std::equal(alone->second.begin(), alone->second.end(), row9)) << request.name;
    ++compared;
  }
  EXPECT_EQ(compared, 2);
}

INSTANTIATE_TEST_SUITE_P(AllCases, GoldenReferenceTest,
                         ::testing::Values("v4-mxfp4", "v4-nvfp4", "v4-nvfp4-pow2", "qwen3-nvfp4",
                                           "ct-nvfp4", "ct-mxfp4"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(ReferenceTest, ALosslessCastAnswersWithTheSameBits) {
  const GoldenCase mx = LoadGoldenCase("v4-mxfp4");
  const GoldenCase nv = LoadGoldenCase("v4-nvfp4-pow2");
  const GoldenCheckpoint mx_checkpoint(mx.checkpoint);
  const GoldenCheckpoint nv_checkpoint(nv.checkpoint);
  ASSERT_EQ(mx.requests.size(), nv.requests.size());
  int equal = 0;
  for (size_t i = 0; i < mx.requests.size(); ++i) {
    if (!nv.requests[i].equals_v4_mxfp4) continue;
    EXPECT_EQ(Answer(mx, mx_checkpoint, mx.requests[i]), Answer(nv, nv_checkpoint, nv.requests[i]))
        << mx.requests[i].name;
    EXPECT_EQ(mx.requests[i].expected, nv.requests[i].expected);
    ++equal;
  }
  EXPECT_GE(equal, 5);
}

// One expert with H = I = 32: gate and up are c and d times the identity, down is the identity.
class OneExpert {
 public:
  OneExpert(uint8_t gate_code, uint8_t up_code, double gate_second_level = 1) {
    const uint8_t codes[] = {gate_code, up_code, 2};  // code 2 is 1.0
    for (int m = 0; m < kNumMatrices; ++m) {
      codes_[m].assign(32 * 16, 0);
      for (int row = 0; row < 32; ++row) {
        codes_[m][row * 16 + row / 2] = static_cast<uint8_t>(codes[m] << (row % 2 * 4));
      }
      scales_[m].assign(32, 127);  // 2^0
      view_.matrices[m] = {codes_[m], scales_[m], 1};
    }
    view_.matrices[0].second_level = gate_second_level;
    spec_.hidden_size = spec_.intermediate_size = 32;
    spec_.num_experts = 1;
  }
  OneExpert(const OneExpert&) = delete;

  // Output element 0 for a hidden state that is x at element 0.
  double Run(double x, float limit, std::vector<int32_t> ids = {0},
             std::vector<float> weights = {1}) {
    spec_.swiglu_limit = limit;
    std::vector<double> hidden(32, 0.0);
    hidden[0] = x;
    const int32_t top_k = static_cast<int32_t>(ids.size());
    return reference::Forward(spec_, {view_}, hidden, ids, weights, top_k)[0];
  }

 private:
  LayerSpec spec_;
  std::vector<uint8_t> codes_[kNumMatrices];
  std::vector<uint8_t> scales_[kNumMatrices];
  reference::ExpertView view_;
};

double Silu(double x) { return x / (1 + std::exp(-x)); }

TEST(ReferenceTest, ComputesSiluOfGateTimesUp) {
  OneExpert expert(/*gate_code=*/2, /*up_code=*/4);  // 1.0, 2.0
  EXPECT_DOUBLE_EQ(expert.Run(3, 0), Silu(3) * 6);
  EXPECT_DOUBLE_EQ(expert.Run(-3, 0), Silu(-3) * -6);
}

TEST(ReferenceTest, ClampsTheGateAboveOnlyAndUpOnBothSides) {
  OneExpert expert(2, 2);
  EXPECT_DOUBLE_EQ(expert.Run(12, 10), Silu(10) * 10);
  EXPECT_DOUBLE_EQ(expert.Run(-12, 10), Silu(-12) * -10);
  EXPECT_DOUBLE_EQ(expert.Run(12, 0), Silu(12) * 12);
}

TEST(ReferenceTest, TheSecondLevelComesBeforeTheClamp) {
  OneExpert expert(2, 2, /*gate_second_level=*/0.5);
  EXPECT_DOUBLE_EQ(expert.Run(12, 10), Silu(6) * 10);
}

TEST(ReferenceTest, DuplicateIdsAreSeparateRoutes) {
  OneExpert expert(2, 2);
  EXPECT_DOUBLE_EQ(expert.Run(1, 0, {0, 0}, {1, 0.5f}), 1.5 * Silu(1));
}

TEST(ReferenceTest, TheWeightOfAMaskedRouteIsNotRead) {
  OneExpert expert(2, 2);
  EXPECT_DOUBLE_EQ(expert.Run(1, 0, {-1, 0}, {std::nanf(""), 1}), Silu(1));
}

TEST(ReferenceTest, NanStaysNan) {
  OneExpert expert(2, 2);
  EXPECT_TRUE(std::isnan(expert.Run(kNan, 10)));
  EXPECT_TRUE(std::isnan(expert.Run(1, 10, {0}, {std::nanf("")})));
}

TEST(ReferenceTest, DequantiseTakesTheLowNibbleFirst) {
  std::vector<uint8_t> codes(16, 0);
  codes[1] = 0xf5;                                   // columns 2 and 3: 3.0 and -6.0
  const std::vector<uint8_t> scales = {0x40, 0x38};  // E4M3: 2.0 and 1.0
  const reference::MatrixView matrix = {codes, scales, 0.25};
  const MatrixShape shape = {1, 32};
  EXPECT_EQ(reference::Dequantise(matrix, Recipe::kNvfp4, shape, 0, 2), 3.0 * 2.0 * 0.25);
  EXPECT_EQ(reference::Dequantise(matrix, Recipe::kNvfp4, shape, 0, 3), -6.0 * 2.0 * 0.25);
  EXPECT_EQ(reference::Dequantise(matrix, Recipe::kNvfp4, shape, 0, 4), 0.0);
}

TEST(RelL2Test, IsTheNormOfTheErrorOverTheNormOfTheAnswer) {
  EXPECT_DOUBLE_EQ(reference::RelL2({3, 4}, {0, 4}), 0.75);
  EXPECT_EQ(reference::RelL2({0, 0}, {0, 0}), 0);
  EXPECT_EQ(reference::RelL2({1}, {0}), kInfinity);
}

TEST(RelL2Test, ANanInOnlyOneIsInfinitelyWrong) {
  EXPECT_EQ(reference::RelL2({std::nanf("")}, {1}), kInfinity);
  EXPECT_EQ(reference::RelL2({1}, {kNan}), kInfinity);
  EXPECT_EQ(reference::RelL2({std::nanf(""), 1}, {kNan, 1}), 0);
  EXPECT_EQ(reference::RelL2({std::numeric_limits<float>::infinity()}, {kInfinity}), 0);
  EXPECT_EQ(reference::RelL2({std::numeric_limits<float>::infinity()}, {1}), kInfinity);
}

}  // namespace
}  // namespace expertd
