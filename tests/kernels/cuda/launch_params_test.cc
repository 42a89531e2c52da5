#include "kernels/cuda/moe_layer/launch_params.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/cuda/moe_layer/traits.h"

// What Launch derives from the sizes of a step. Nothing is read or written at the addresses.
namespace expertd::cuda::moe_layer {
namespace {

constexpr int kCtas = 132;

KernelConfig ConfigOf(int token_tile) {
  return {.token_tile = token_tile, .num_stages = 5, .num_ctas = kCtas, .shared_bytes = 0};
}

MoeLayerParams ParamsOf(int num_ranks, int rank, int num_tokens) {
  MoeLayerParams params;
  params.num_tokens = num_tokens;
  params.top_k = 6;
  params.hidden = 7168;
  params.intermediate = 3072;
  params.num_experts = 384;
  params.num_slots = 48;
  params.slots_per_rank = 48;
  params.step = 4;
  params.peers.base = reinterpret_cast<char*>(uintptr_t{1} << 32);
  params.peers.num_ranks = num_ranks;
  params.peers.rank = rank;
  params.workspace = layout::PlanWorkspace({num_ranks, 256, 6, 48, 7168, 3072});
  return params;
}

TEST(LaunchParams, NoClampIsAnInfiniteOne) {
  for (const float limit : {0.0f, -1.0f, 10.0f}) {
    MoeLayerParams params = ParamsOf(1, 0, 8);
    params.swiglu_limit = limit;
    const float expected = limit > 0 ? limit : std::numeric_limits<float>::infinity();
    EXPECT_EQ(CompleteParams(params, layout::WeightFormat::kMx, ConfigOf(16)).swiglu_limit,
              expected);
  }
}

// Only then do ranks finish a column block of FC2 before they go on.
TEST(LaunchParams, SeveralRanksGoByColumnBlocks) {
  EXPECT_EQ(CompleteParams(ParamsOf(1, 0, 8), layout::WeightFormat::kMx, ConfigOf(16))
                .schedule.last_block_row,
            0);
  EXPECT_EQ(CompleteParams(ParamsOf(2, 1, 8), layout::WeightFormat::kMx, ConfigOf(16))
                .schedule.last_block_row,
            7168 / 64 - kColumnBlockTiles);
}

TEST(LaunchParams, TheShareOfXOfAllCtasIsXUnlessThatIsTooMuch) {
  constexpr int64_t kRowBytes = 7168 * 2;
  for (const int tokens : {1, 2, 63, 131, 132, 133, 585}) {
    const int64_t share =
        CompleteParams(ParamsOf(1, 0, tokens), layout::WeightFormat::kMx, ConfigOf(64)).x_share;
    ASSERT_LE(tokens * kRowBytes, kMaxPrefetchedTokenBytes);
    EXPECT_EQ(share % 128, 0) << tokens;
    EXPECT_GE(share * kCtas, tokens * kRowBytes) << tokens;
    EXPECT_LE((share - 128) * kCtas, tokens * kRowBytes) << tokens;
  }
  const MoeLayerParams many =
      CompleteParams(ParamsOf(1, 0, 586), layout::WeightFormat::kMx, ConfigOf(64));
  ASSERT_GT(586 * kRowBytes, kMaxPrefetchedTokenBytes);
  EXPECT_EQ(many.x_share, 0);
}

TEST(LaunchParams, TwoRingsFollowTheStateAndTheTablesTheRings) {
  for (const auto format : {layout::WeightFormat::kMx, layout::WeightFormat::kNv}) {
    const MoeLayerParams params = CompleteParams(ParamsOf(1, 0, 8), format, ConfigOf(48));
    EXPECT_EQ(params.token_stride, 48u * 512);
    EXPECT_EQ(params.tokens_offset,
              static_cast<uint32_t>(kStateBytes + 5 * WeightStageBytes(format)));
    EXPECT_EQ(params.tables_offset, params.tokens_offset + 5 * params.token_stride);
    EXPECT_EQ(params.tokens_offset % 1024, 0u);
    EXPECT_EQ(params.token_stride % 1024, 0u);
  }
}

TEST(LaunchParams, InOneRingAStagesTokensLieBehindItsWeights) {
  for (const auto format : {layout::WeightFormat::kMx, layout::WeightFormat::kNv}) {
    KernelConfig config = ConfigOf(24);
    config.num_stages = 4;
    const MoeLayerParams params = CompleteParams(ParamsOf(1, 0, 8), format, config);
    const uint32_t weights = WeightStageBytes(format);
    EXPECT_EQ(params.token_stride, weights + 24 * 512);
    EXPECT_EQ(params.token_stride, static_cast<uint32_t>(WeightStride(format, 24)));
    EXPECT_EQ(params.tokens_offset, kStateBytes + weights);
    EXPECT_EQ(params.tables_offset, kStateBytes + 4 * params.token_stride);
    EXPECT_EQ(params.tokens_offset % 1024, 0u);
    EXPECT_EQ(params.token_stride % 1024, 0u);
  }
}

TEST(LaunchParams, WhatTheRoutingNeedNotDivideIsWhatItWouldDivideBy) {
  MoeLayerParams params = ParamsOf(1, 0, 8);
  params.slots_per_rank = 49;
  params = CompleteParams(params, layout::WeightFormat::kMx, ConfigOf(40));
  for (const uint32_t number : {0u, 1u, 5u, 6u, 39u, 40u, 48u, 49u, 12345u, 0x7fffffffu}) {
    EXPECT_EQ(params.by_top_k.Quotient(number), number / 6);
    EXPECT_EQ(params.by_slots_per_rank.Quotient(number), number / 49);
    EXPECT_EQ(params.by_token_tile.Quotient(number), number / 40);
  }
  EXPECT_EQ(params.schedule.num_slots, 48);
  EXPECT_EQ(params.schedule.fc1_row_tiles, 2 * 3072 / 64);
  EXPECT_EQ(params.schedule.fc2_row_tiles, 7168 / 64);
  EXPECT_EQ(params.schedule.ctas, static_cast<uint32_t>(kCtas));
}

// What the ranks send has two buffers, of all ranks each.
TEST(LaunchParams, TheRowsOfTwoStepsLieApart) {
  MoeLayerParams params = ParamsOf(3, 2, 8);
  const auto tokens_of = [&](uint32_t step) {
    params.step = step;
    return CompleteParams(params, layout::WeightFormat::kMx, ConfigOf(24)).local.tokens;
  };
  EXPECT_EQ(tokens_of(5) - tokens_of(4), 3 * 256 * 7168);
  EXPECT_EQ(tokens_of(6), tokens_of(4));
}

}  // namespace
}  // namespace expertd::cuda::moe_layer
