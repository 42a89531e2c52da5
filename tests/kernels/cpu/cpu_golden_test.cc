#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "loader/checkpoint.h"
#include "loader/load_plan.h"
#include "loader/weight_loader.h"
#include "tests/kernels/cpu/cpu_fixture.h"
#include "tests/testing/golden_vectors.h"

// The golden checkpoints, read by the loader and answered by the CPU backend.
namespace expertd::testing {
namespace {

struct Served {
  GoldenCase golden;
  std::vector<LayerSpec> layers;
  std::unique_ptr<Backend> backend;
};

Served Serve(const std::string& name, int32_t num_ranks) {
  Served served;
  served.golden = LoadGoldenCase(name);
  const auto checkpoint = Checkpoint::Open(served.golden.checkpoint);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  served.layers = checkpoint->layers();
  BackendOptions options;
  options.layers = checkpoint->layers();
  options.placement = std::make_shared<const Placement>(
      *Placement::Contiguous(served.golden.num_experts, num_ranks));
  options.max_tokens_per_rank = 32;
  options.num_threads = 2;
  served.backend = *MakeCpuBackend(options);
  const LoadPlan plan = MakeLoadPlan(*checkpoint, *options.placement, 0, num_ranks);
  const absl::Status status = LoadWeights(*checkpoint, plan, served.backend->sink());
  EXPECT_TRUE(status.ok()) << status;
  return served;
}

std::vector<float> Answer(Served& served, const GoldenRequest& request, DType output_dtype) {
  static uint64_t step = 0;
  const auto spec = std::find_if(served.layers.begin(), served.layers.end(),
                                 [&](const LayerSpec& s) { return s.layer == request.layer; });
  EXPECT_NE(spec, served.layers.end()) << request.name;
  Rows rows{request.num_tokens, request.top_k, request.HiddenAs<float>(), request.ids,
            request.weights};
  const auto output =
      RunStep(*served.backend, *spec, rows, {.output_dtype = output_dtype, .step = step++});
  EXPECT_TRUE(output.ok()) << output.status();
  return output.ok() ? *output : std::vector<float>{};
}

class CpuGolden : public ::testing::TestWithParam<std::string> {};

TEST_P(CpuGolden, IsAnsweredWithinTwiceTheStatedError) {
  for (const int32_t num_ranks : {1, 2}) {
    Served served = Serve(GetParam(), num_ranks);
    for (const GoldenRequest& request : served.golden.requests) {
      const std::vector<float> bf16 = Answer(served, request, DType::kBf16);
      EXPECT_LE(reference::RelL2(bf16, request.expected), 2 * request.expected_rel_l2_bf16)
          << request.name << " on " << num_ranks << " ranks";
      const std::vector<float> f32 = Answer(served, request, DType::kF32);
      EXPECT_LT(reference::RelL2(f32, request.expected), 5e-6) << request.name;
    }
  }
}

TEST_P(CpuGolden, ARowOfALargeRequestIsTheSmallRequest) {
  Served served = Serve(GetParam(), 2);
  int compared = 0;
  for (const GoldenRequest& large : served.golden.requests) {
    if (large.name.find("-t17") == std::string::npos) continue;
    for (const GoldenRequest& small : served.golden.requests) {
      if (small.name != large.name.substr(0, large.name.find("-t17")) + "-t1") continue;
      const int64_t hidden_size = served.golden.hidden_size;
      const std::vector<float> many = Answer(served, large, DType::kF32);
      const std::vector<float> one = Answer(served, small, DType::kF32);
      EXPECT_TRUE(SameBits(one, absl::MakeConstSpan(many).subspan(9 * hidden_size, hidden_size)))
          << large.name;
      ++compared;
    }
  }
  EXPECT_GE(compared, 2);
}

INSTANTIATE_TEST_SUITE_P(Served, CpuGolden, ::testing::ValuesIn(ServedGoldenCases()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(CpuGoldenCast, ALosslessCastToNvfp4HasTheBitsOfTheOriginal) {
  Served original = Serve("v4-mxfp4", 2);
  Served cast = Serve("v4-nvfp4-pow2", 2);
  int compared = 0;
  for (const GoldenRequest& request : cast.golden.requests) {
    if (!request.equals_v4_mxfp4 || request.num_tokens == 0) continue;
    EXPECT_TRUE(
        SameBits(Answer(original, request, DType::kF32), Answer(cast, request, DType::kF32)))
        << request.name;
    ++compared;
  }
  EXPECT_GE(compared, 3);
}

}  // namespace
}  // namespace expertd::testing
