#include "kernels/cuda/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/limits.h"
#include "kernels/cuda/cuda_backend.h"

// Nothing here needs a GPU.
namespace expertd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kGib = int64_t{1} << 30;

LayerSpec Pro(int32_t layer = 3) {
  return {.layer = layer,
          .hidden_size = 7168,
          .intermediate_size = 3072,
          .num_experts = 48,
          .top_k = 6,
          .swiglu_limit = 10};
}

cuda::CudaBackendOptions Options(LayerSpec spec, int32_t ranks = 1) {
  cuda::CudaBackendOptions options;
  options.common.placement =
      std::make_shared<const Placement>(*Placement::Contiguous(spec.num_experts, ranks));
  options.common.layers = {std::move(spec)};
  options.common.max_tokens_per_rank = 64;
  return options;
}

TEST(MemoryPlanTest, PackedWeightsTakeWhatTheFilesTake) {
  const LayerSpec spec = Pro();
  const std::vector<LayerSpec> layers = {spec};
  const cuda::MemoryPlan plan = cuda::PlanMemory({layers, 48, 1024, cuda::KernelPath::kFused});
  int64_t file_bytes = 0;
  for (int m = 0; m < kNumMatrices; ++m) {
    const MatrixShape shape = ShapeOf(spec, static_cast<Matrix>(m));
    file_bytes += 48 * (shape.CodeBytes() + shape.ScaleBytes(spec.recipe));
  }
  EXPECT_GE(plan.weights, file_bytes);
  EXPECT_LT(plan.weights, file_bytes + file_bytes / 1000);  // factors and rounding
}

TEST(MemoryPlanTest, LoadingBuffersStayWithinTheirLimit) {
  const std::vector<LayerSpec> layers = {Pro()};
  const cuda::StagingLayout staging = cuda::PlanStaging(layers);
  EXPECT_LE(staging.bytes * cuda::NumStagingBuffers(staging), limits::kCudaStagingBytes);
  EXPECT_GE(cuda::NumStagingBuffers(staging), 2);
}

TEST(MemoryPlanTest, TooLittleMemoryNamesTheLargestTThatFits) {
  const std::vector<LayerSpec> layers = {Pro()};
  const cuda::MemoryQuestion question = {layers, 48, 8192, cuda::KernelPath::kFused};
  EXPECT_TRUE(cuda::CheckMemory(question, 140 * kGib).ok());
  const absl::Status status = cuda::CheckMemory(question, 3 * kGib);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const std::string text(status.message());
  const size_t at = text.find("that fits is ");
  ASSERT_NE(at, std::string::npos) << text;
  cuda::MemoryQuestion smaller = question;
  smaller.max_tokens_per_rank = std::stoi(text.substr(at + 13));
  EXPECT_TRUE(cuda::CheckMemory(smaller, 3 * kGib).ok());
  ++smaller.max_tokens_per_rank;
  EXPECT_FALSE(cuda::CheckMemory(smaller, 3 * kGib).ok());
}

TEST(MemoryPlanTest, TheWindowGrowsWithTheRanksAndIsTheSameForAll) {
  const std::vector<LayerSpec> layers = {Pro()};
  cuda::MemoryQuestion question = {layers, 48, 1024, cuda::KernelPath::kFused};
  const int64_t alone = cuda::PlanMemory(question).workspace;
  question.num_ranks = 2;
  const layout::WorkspaceShape shape = cuda::ShapeOfWorkspace(layers[0], question);
  EXPECT_EQ(shape.num_ranks, 2);
  const int64_t together = cuda::PlanMemory(question).workspace;
  EXPECT_EQ(together, layout::PlanWorkspace(shape).bytes);
  // Twice the routes, but for the CTAs' own lists of routes, and a peer's rows and partial
  // rows.
  const int64_t rows = int64_t{1024} * 7168 * (2 * 2 + 4);
  const int64_t own_lists = int64_t{layout::kMaxCtas} * layout::kOwnSortRoutes * 5;
  EXPECT_GT(together, 2 * (alone - own_lists) + rows);
  EXPECT_LT(together, 2 * alone + 2 * rows);
}

TEST(MemoryPlanTest, WhatNcclKeepsToConnectRanksIsPartOfThePlan) {
  const std::vector<LayerSpec> layers = {Pro()};
  cuda::MemoryQuestion question = {layers, 48, 1024, cuda::KernelPath::kFused};
  EXPECT_EQ(cuda::PlanMemory(question).nccl, 0);
  EXPECT_THAT(std::string(cuda::CheckMemory(question, 2 * kGib).message()), Not(HasSubstr("NCCL")));
  question.num_ranks = 2;
  EXPECT_EQ(cuda::PlanMemory(question).nccl, limits::kNcclGroupBytes);
  EXPECT_THAT(std::string(cuda::CheckMemory(question, 2 * kGib).message()),
              HasSubstr("NCCL 0.44 GiB"));
  const int64_t needed = cuda::PlanMemory(question).total() + limits::kCudaReserveBytes;
  EXPECT_TRUE(cuda::CheckMemory(question, needed).ok());
  EXPECT_FALSE(cuda::CheckMemory(question, needed - 1).ok());
}

TEST(MemoryPlanTest, TheWorkspaceIsForTheLayersOwnKAndLargerOnesRunInParts) {
  const std::vector<LayerSpec> layers = {Pro()};  // K 6
  for (const int32_t tokens : {1, 2, 5, 6, 7, 100, 1024, 65536}) {
    const cuda::MemoryQuestion question = {layers, 48, tokens, cuda::KernelPath::kFused};
    const int64_t planned = int64_t{tokens} * cuda::PlannedTopK(question);
    EXPECT_GE(cuda::PlannedTopK(question), 6);
    EXPECT_EQ(cuda::PartTokens(question, 6), tokens);
    for (int32_t top_k = 1; top_k <= limits::kMaxTopK; ++top_k) {
      const int32_t rows = cuda::PartTokens(question, top_k);
      EXPECT_GE(rows, 1) << tokens << " tokens, K " << top_k;
      EXPECT_LE(rows, tokens);
      EXPECT_LE(int64_t{rows} * top_k, planned) << tokens << " tokens, K " << top_k;
    }
  }
  const cuda::MemoryQuestion usual = {layers, 48, 1024, cuda::KernelPath::kFused};
  EXPECT_EQ(cuda::PlannedTopK(usual), 6);
  EXPECT_EQ(cuda::PartTokens(usual, 32), 192);
  std::vector<LayerSpec> wide = {Pro()};
  wide[0].top_k = limits::kMaxTopK;
  EXPECT_EQ(cuda::PlannedTopK({wide, 48, 1024, cuda::KernelPath::kFused}), limits::kMaxTopK);
}

TEST(MemoryPlanTest, WeightsThatDoNotFitAreSaidToBeTheReason) {
  const std::vector<LayerSpec> layers = {Pro()};
  const absl::Status status = cuda::CheckMemory({layers, 48, 64, cuda::KernelPath::kFused}, kGib);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no max_tokens_per_rank fits"));
}

TEST(CudaOptionsTest, WhatTheKernelsCannotRunIsRefusedBeforeAnyLaunch) {
  EXPECT_TRUE(cuda::CheckOptions(Options(Pro())).ok());

  LayerSpec narrow = Pro();
  narrow.hidden_size = 7168 + 32;
  absl::Status status = cuda::CheckOptions(Options(narrow));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("layer 3: hidden_size: found 7200, expected a multiple of 64"));

  LayerSpec odd = Pro();
  odd.intermediate_size = 96;
  status = cuda::CheckOptions(Options(odd));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("layer 3: intermediate_size: found 96, expected a multiple of 64"));

  LayerSpec many = Pro();
  many.num_experts = 1025;
  EXPECT_EQ(cuda::CheckOptions(Options(many)).code(), absl::StatusCode::kInvalidArgument);
  many.num_experts = 1024;
  EXPECT_TRUE(cuda::CheckOptions(Options(many)).ok());

  cuda::CudaBackendOptions too_many_tokens = Options(Pro());
  too_many_tokens.common.max_tokens_per_rank = limits::kMaxTokensPerRank + 1;
  EXPECT_EQ(cuda::CheckOptions(too_many_tokens).code(), absl::StatusCode::kInvalidArgument);

  EXPECT_TRUE(cuda::CheckOptions(Options(Pro(), 2)).ok());
  cuda::CudaBackendOptions plain = Options(Pro(), 2);
  plain.path = cuda::KernelPath::kUnfused;
  EXPECT_EQ(cuda::CheckOptions(plain).code(), absl::StatusCode::kInvalidArgument);
  status = cuda::CheckOptions(Options(Pro(), 33));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ranks: found 33, expected at most 32"));

  cuda::CudaBackendOptions mixed = Options(Pro());
  mixed.common.layers.push_back(Pro(4));
  mixed.common.layers[1].intermediate_size = 2048;
  EXPECT_EQ(cuda::CheckOptions(mixed).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace expertd
