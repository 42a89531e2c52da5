#include "tests/testing/golden_vectors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "loader/checkpoint.h"
#include "loader/load_plan.h"
#include "loader/weight_loader.h"
#include "tests/gpu/testing/backend_driver.h"
#include "tests/gpu/testing/device.h"

// The golden checkpoints, read by the loader and answered by the CUDA backend, on both of its
// paths.
namespace expertd {
namespace {

using testing::GoldenCase;
using testing::GoldenRequest;
using testing::HostBatch;

struct Served {
  GoldenCase golden;
  std::vector<LayerSpec> layers;
  std::unique_ptr<Backend> backend;
};

void Serve(const std::string& name, cuda::KernelPath path, Served* served) {
  served->golden = testing::LoadGoldenCase(name);
  const auto checkpoint = Checkpoint::Open(served->golden.checkpoint);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  served->layers = checkpoint->layers();
  cuda::CudaBackendOptions options;
  options.path = path;
  options.common.layers = checkpoint->layers();
  options.common.placement =
      std::make_shared<const Placement>(*Placement::Contiguous(served->golden.num_experts, 1));
  options.common.max_tokens_per_rank = 32;
  auto backend = cuda::MakeCudaBackend(options);
  ASSERT_TRUE(backend.ok()) << backend.status();
  served->backend = *std::move(backend);
  const LoadPlan plan = MakeLoadPlan(*checkpoint, *options.common.placement, 0, 1);
  const absl::Status status = LoadWeights(*checkpoint, plan, served->backend->sink());
  ASSERT_TRUE(status.ok()) << status;
}

testing::StepOutput Answer(Served& served, const GoldenRequest& request, DType output) {
  const auto spec = std::find_if(served.layers.begin(), served.layers.end(),
                                 [&](const LayerSpec& s) { return s.layer == request.layer; });
  EXPECT_NE(spec, served.layers.end()) << request.name;
  HostBatch batch;
  batch.num_tokens = request.num_tokens;
  batch.top_k = request.top_k;
  batch.hidden = request.hidden;
  batch.ids = request.ids;
  batch.weights = request.weights;
  for (int32_t t = 0; t < request.num_tokens; ++t) batch.row_in_request.push_back(t);
  const auto answer = testing::RunStep(*served.backend, *spec, batch, DType::kBf16, output);
  EXPECT_TRUE(answer.ok()) << request.name << ": " << answer.status();
  return answer.ok() ? *answer : testing::StepOutput{};
}

class GpuGoldenTest : public testing::GpuTest,
                      public ::testing::WithParamInterface<cuda::KernelPath> {};

INSTANTIATE_TEST_SUITE_P(Paths, GpuGoldenTest,
                         ::testing::Values(cuda::KernelPath::kFused, cuda::KernelPath::kUnfused),
                         [](const auto& info) {
                           return info.param == cuda::KernelPath::kFused ? "Fused" : "Unfused";
                         });

TEST_P(GpuGoldenTest, EveryRequestIsAnsweredWithinTwiceTheStatedError) {
  for (const std::string& name : testing::ServedGoldenCases()) {
    Served served;
    ASSERT_NO_FATAL_FAILURE(Serve(name, GetParam(), &served));
    for (const GoldenRequest& request : served.golden.requests) {
      const testing::StepOutput answer = Answer(served, request, DType::kBf16);
      EXPECT_LE(reference::RelL2(answer.values, request.expected), 2 * request.expected_rel_l2_bf16)
          << name << " " << request.name;
    }
  }
}

TEST_P(GpuGoldenTest, ARowOfALargeRequestIsTheSmallRequest) {
  int compared = 0;
  for (const std::string& name : testing::ServedGoldenCases()) {
    Served served;
    ASSERT_NO_FATAL_FAILURE(Serve(name, GetParam(), &served));
    const int64_t row_bytes = served.golden.hidden_size * 2;
    for (const GoldenRequest& large : served.golden.requests) {
      const size_t suffix = large.name.find("-t17");
      if (suffix == std::string::npos) continue;
      for (const GoldenRequest& small : served.golden.requests) {
        if (small.name != large.name.substr(0, suffix) + "-t1") continue;
        const std::vector<uint8_t> many = Answer(served, large, DType::kBf16).bytes;
        const std::vector<uint8_t> one = Answer(served, small, DType::kBf16).bytes;
        ASSERT_EQ(many.size(), static_cast<size_t>(17 * row_bytes));
        EXPECT_TRUE(std::equal(one.begin(), one.end(), many.begin() + 9 * row_bytes))
            << name << " " << large.name;
        ++compared;
      }
    }
  }
  EXPECT_GE(compared, 6);
}

}  // namespace
}  // namespace expertd
