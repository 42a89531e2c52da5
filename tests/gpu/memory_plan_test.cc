#include "kernels/cuda/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/limits.h"
#include "kernels/cuda/cuda_backend.h"

// Nothing here needs a GPU.
namespace expertd {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGib = int64_t{1} << 30;

LayerSpec Pro(int32_t layer = 3) {
  return {.layer = layer,
          .hidden_size = 7168,
          .intermediate_size = 3072,
          .num_experts = 48,
          .top_k = 6,
          .swiglu_limit = 10};
}

BackendOptions Options(LayerSpec spec) {
  BackendOptions options;
  options.placement =
      std::make_shared<const Placement>(*Placement::Contiguous(spec.num_experts, 1));
  options.layers = {std::move(spec)};
  options.max_tokens_per_rank = 64;
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
  const absl::Status status = cuda::CheckMemory(question, 6 * kGib);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const std::string text(status.message());
  const size_t at = text.find("that fits is ");
  ASSERT_NE(at, std::string::npos) << text;
  cuda::MemoryQuestion smaller = question;
  smaller.max_tokens_per_rank = std::stoi(text.substr(at + 13));
  EXPECT_TRUE(cuda::CheckMemory(smaller, 6 * kGib).ok());
  ++smaller.max_tokens_per_rank;
  EXPECT_FALSE(cuda::CheckMemory(smaller, 6 * kGib).ok());
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

  BackendOptions too_many_tokens = Options(Pro());
  too_many_tokens.max_tokens_per_rank = limits::kMaxTokensPerRank + 1;
  EXPECT_EQ(cuda::CheckOptions(too_many_tokens).code(), absl::StatusCode::kInvalidArgument);

  BackendOptions two_ranks = Options(Pro());
  two_ranks.placement = std::make_shared<const Placement>(*Placement::Contiguous(48, 2));
  status = cuda::CheckOptions(two_ranks);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("2 ranks"));

  BackendOptions mixed = Options(Pro());
  mixed.layers.push_back(Pro(4));
  mixed.layers[1].intermediate_size = 2048;
  EXPECT_EQ(cuda::CheckOptions(mixed).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace expertd
