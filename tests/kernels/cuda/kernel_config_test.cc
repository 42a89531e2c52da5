#include "kernels/cuda/kernel_config.h"

#include <initializer_list>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/moe_layer/traits.h"

namespace expertd::cuda {
namespace {

using layout::WeightFormat;
using testing::HasSubstr;

constexpr LayerShape kShapes[] = {
    {WeightFormat::kMx, 7168, 3072, 48, 48, 1},     {WeightFormat::kNv, 7168, 2048, 32, 32, 1},
    {WeightFormat::kMx, 2880, 2880, 128, 128, 1},   {WeightFormat::kNv, 64, 64, 1, 1, 1},
    {WeightFormat::kMx, 4096, 1536, 1024, 1024, 1}, {WeightFormat::kNv, 4096, 2048, 4096, 512, 8}};

TEST(KernelConfig, EveryShapeAndStepFitsSharedMemoryWithEnoughStages) {
  for (const LayerShape& layer : kShapes) {
    for (const int tokens : {0, 1, 8, 64, 256, 1000, 8192, 65536}) {
      for (const int top_k : {1, 6, 32}) {
        const auto config = ChooseKernelConfig(layer, tokens, top_k, 132);
        ASSERT_TRUE(config.ok()) << config.status();
        EXPECT_LE(config->shared_bytes, kMaxSharedBytes) << config->ToString();
        EXPECT_GE(config->num_stages, 3) << config->ToString();
        EXPECT_LE(config->num_stages, moe_layer::kMaxStages);
        if (moe_layer::HasOneRing(config->token_tile)) {
          EXPECT_EQ(config->token_tile,
                    moe_layer::kVariantTokens[moe_layer::VariantFor(config->token_tile)]);
        }
        EXPECT_TRUE(moe_layer::HasWidth(layer.format, config->token_tile)) << config->ToString();
        EXPECT_LE(config->token_tile,
                  moe_layer::kVariantTokens[moe_layer::VariantFor(config->token_tile)]);
        EXPECT_EQ(config->num_ctas, 132);
      }
    }
  }
}

// Counts, the table of experts, the slot of every route of a step that each CTA sorts alone, and a
// copy of the parameters.
TEST(KernelConfig, TheRingsHoldWhatSortingNeeds) {
  for (const LayerShape& layer : kShapes) {
    for (const int tokens : {0, 1, 64, 256, 512, 8192}) {
      const auto config = ChooseKernelConfig(layer, tokens, 8, 132);
      ASSERT_TRUE(config.ok());
      const int rings = config->shared_bytes - moe_layer::kSortOffset - 8 * (layer.num_slots + 1) -
                        config->near_routes * moe_layer::kNearRouteBytes;
      EXPECT_GE(rings, moe_layer::kWarps * layer.num_slots * 4 + layer.num_experts * 2 +
                           layout::kOwnSortRoutes * 2 +
                           static_cast<int>((sizeof(moe_layer::MoeLayerParams) + 15) / 16 * 16))
          << config->ToString();
    }
  }
}

TEST(KernelConfig, TheTokenTileGrowsWithTheRoutesOfAnExpert) {
  for (const auto& [layer, most] : {std::pair(kShapes[0], 80), std::pair(kShapes[1], 72)}) {
    int last = 0;
    for (const int tokens : {1, 64, 128, 256, 512, 8192}) {
      const auto config = ChooseKernelConfig(layer, tokens, 6, 132);
      ASSERT_TRUE(config.ok());
      EXPECT_GE(config->token_tile, last);
      last = config->token_tile;
    }
    EXPECT_EQ(last, most);
  }
}

TEST(KernelConfig, TheMostRowsOfATokenTileAreThoseOfWhichThreeStagesFit) {
  using namespace moe_layer;
  for (const WeightFormat format : {WeightFormat::kMx, WeightFormat::kNv}) {
    const int room = kMaxSharedBytes - kStateBytes - 3 * WeightStageBytes(format);
    EXPECT_LE(3 * TokenStageBytes(MaxTokenTile(format)), room);
    if (MaxTokenTile(format) < kMaxTokenTile) {
      EXPECT_GT(3 * TokenStageBytes(MaxTokenTile(format) + 8), room);
    }
  }
}

TEST(KernelConfig, ItPrintsItself) {
  const auto config = ChooseKernelConfig(kShapes[0], 64, 6, 132);
  ASSERT_TRUE(config.ok());
  EXPECT_THAT(config->ToString(), HasSubstr("token tile 16"));
  EXPECT_THAT(config->ToString(), HasSubstr("132 CTAs"));
}

TEST(KernelConfig, WhatTheKernelCannotServeIsRefusedWithFieldFoundAndExpected) {
  LayerShape layer = kShapes[0];
  layer.hidden = 7184;
  EXPECT_THAT(ChooseKernelConfig(layer, 1, 6, 132).status().ToString(),
              HasSubstr("hidden_size: found 7184, expected a multiple of 64"));
  layer = kShapes[0];
  layer.intermediate = 32;
  EXPECT_THAT(CheckLayerShape(layer).ToString(), HasSubstr("intermediate_size: found 32"));
  layer = kShapes[0];
  layer.num_slots = 1025;
  EXPECT_THAT(CheckLayerShape(layer).ToString(), HasSubstr("expert slots of a rank: found 1025"));
  EXPECT_THAT(ChooseKernelConfig(kShapes[0], 1, 33, 132).status().ToString(),
              HasSubstr("top_k: found 33, expected 1 to 32"));
  EXPECT_THAT(ChooseKernelConfig(kShapes[0], -1, 6, 132).status().ToString(),
              HasSubstr("tokens: found -1"));
}

TEST(KernelConfig, OnlyHopperIsAccepted) {
  EXPECT_TRUE(CheckDevice(9, 0, kMaxSharedBytes).ok());
  EXPECT_THAT(CheckDevice(8, 0, kMaxSharedBytes).ToString(),
              HasSubstr("compute capability: found 8.0, expected 9.0"));
  EXPECT_THAT(CheckDevice(9, 0, 100 << 10).ToString(), HasSubstr("shared memory per block"));
}

TEST(Workspace, IsWithinTheBoundForTheLargestFoldAndGrowsWithTheWorstRouting) {
  const auto pro = layout::PlanWorkspace({1, 8192, 6, 48, 7168, 3072});
  EXPECT_LE(pro.bytes, 2ll << 30);
  const auto two_ranks = layout::PlanWorkspace({2, 8192, 6, 48, 7168, 3072});
  EXPECT_GE(two_ranks.bytes, 2 * (pro.y - pro.h));
}

TEST(Workspace, RegionsFollowEachOtherAligned) {
  const auto offsets = layout::PlanWorkspace({1, 33, 5, 7, 320, 192});
  const int64_t all[] = {offsets.head,        offsets.routes,   offsets.route_slots,
                         offsets.sort_counts, offsets.fc1_done, offsets.fc2_done,
                         offsets.sort_flags,  offsets.h,        offsets.y,
                         offsets.bytes};
  for (size_t i = 0; i + 1 < std::size(all); ++i) {
    EXPECT_LT(all[i], all[i + 1]);
    EXPECT_EQ(all[i] % 256, 0);
  }
  EXPECT_EQ(offsets.bytes - offsets.y, (33 * 5 * 320 * 2 + 255) / 256 * 256);
}

}  // namespace
}  // namespace expertd::cuda
