#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu/testing/moe_cases.h"
#include "tests/kernels/cuda/simt/layer_steps.h"
#include "tests/kernels/cuda/simt/rank_layer.h"

// The fused kernel's own code on emulated GPUs: tiny shapes, several ranks, in orders that seeds
// decide.
namespace expertd {
namespace {

using simt::Batches;
using simt::ExpectRight;
using simt::ExpectRightSteps;
using simt::PlacementOf;
using simt::RankLayer;
using simt::Spec;
using testing::HostBatch;
using testing::HostLayer;
using testing::Routing;

bool SameBits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](auto& x, auto& y) {
           return x.size() == y.size() &&
                  (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
         });
}

struct Case {
  const char* name;
  Recipe recipe;
  std::vector<int32_t> tokens;  // by rank
  Routing routing = Routing::kUniform;
  int32_t top_k = 3;
  int num_ctas = 2;
  int32_t slots = 0;  // of a rank, redundant; 0: contiguous
  bool partials_bf16 = false;
};

const Case kCases[] = {
    {"NothingToDo", Recipe::kMxfp4, {0}},
    {"OneToken", Recipe::kMxfp4, {1}, Routing::kUniform, 3, 3},
    {"OneRank", Recipe::kNvfp4, {9}},
    {"OneExpert", Recipe::kMxfp4, {90}, Routing::kOneExpert, 1},
    {"Masked", Recipe::kNvfp4, {33}, Routing::kMasked, 4},
    {"AllMasked", Recipe::kMxfp4, {5}, Routing::kAllMasked},
    {"TwoRanksFewTokens", Recipe::kMxfp4, {2, 1}},
    {"TwoRanksManyTokens", Recipe::kMxfp4, {40, 23}},
    {"TwoRanksNothingOnOne", Recipe::kNvfp4, {0, 17}},
    {"TwoRanksNothingAtAll", Recipe::kMxfp4, {0, 0}},
    {"TwoRanksMasked", Recipe::kMxfp4, {12, 7}, Routing::kMasked, 5},
    {"TwoRanksAllToOne", Recipe::kMxfp4, {21, 3}, Routing::kOneExpert},
    {"TwoRanksReplicas", Recipe::kMxfp4, {14, 9}, Routing::kSkewed, 4, 2, 5},
    {"TwoRanksBf16Partials", Recipe::kMxfp4, {10, 11}, Routing::kUniform, 4, 2, 0, true},
    {"TwoRanksFewTokensBf16Partials", Recipe::kMxfp4, {3, 2}, Routing::kUniform, 4, 3, 0, true},
    {"TwoRanksFewBesideMany", Recipe::kMxfp4, {2, 25}, Routing::kUniform, 4, 3},
    {"TwoRanksThirtyTwoRoutes", Recipe::kMxfp4, {6, 2}, Routing::kSkewed, 32},
    {"TwoRanksSharedSort", Recipe::kMxfp4, {80, 130}, Routing::kSkewed, 32, 3},
    {"ThreeRanks", Recipe::kNvfp4, {7, 0, 12}, Routing::kSkewed},
    {"FourRanksUneven", Recipe::kMxfp4, {1, 9, 0, 30}, Routing::kUniform, 2, 1},
    {"EightRanksSomeWithoutExperts",
     Recipe::kMxfp4,
     {3, 1, 0, 2, 5, 1, 1, 4},
     Routing::kUniform,
     3,
     1},
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class SimtMoeLayerTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Cases, SimtMoeLayerTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

RankLayer::Options OptionsOf(const Case& c, uint64_t seed) {
  return {.num_ctas = c.num_ctas,
          .max_tokens = std::max(1, *std::max_element(c.tokens.begin(), c.tokens.end())),
          .max_top_k = c.top_k,
          .partials_bf16 = c.partials_bf16,
          .seed = seed};
}

TEST_P(SimtMoeLayerTest, AgreesWithTheReferenceInEveryOrder) {
  const Case& c = GetParam();
  const HostLayer layer = testing::MakeRandomLayer(Spec(192, 128, 6, c.recipe), 1);
  const auto ranks = static_cast<int32_t>(c.tokens.size());
  const auto batches = Batches(layer.spec, c.tokens, c.top_k, c.routing, 7);
  std::vector<std::vector<float>> first;
  for (const uint64_t seed : {1, 2}) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RankLayer run(layer, PlacementOf(6, ranks, c.slots), OptionsOf(c, seed));
    const auto outputs = run.Run({batches});
    ASSERT_EQ(run.error(), "");
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(run.fault(rank).code, 0u) << rank;
    ExpectRight(layer, batches, outputs[0]);
    if (first.empty()) first = outputs[0];
    EXPECT_TRUE(SameBits(outputs[0], first));
  }
}

// Six stages a tile: of a CTA's first one the multiplying warps bring what the ring holds. Narrow
// and wide token tiles, none, and tiles of which a CTA finds none left.
TEST(SimtMoeLayer, LongTilesBeginWithTokensThatTheMultiplyingWarpsBring) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const HostLayer layer = testing::MakeRandomLayer(Spec(1344, 128, 4, recipe), 17);
    std::vector<RankLayer::Batches> steps;
    for (const int32_t tokens : {3, 40, 0, 130, 1}) {
      steps.push_back(Batches(layer.spec, {tokens}, 2, Routing::kUniform, 50 + tokens));
    }
    ExpectRightSteps(layer, PlacementOf(4, 1),
                     {.num_ctas = 5, .max_tokens = 130, .max_top_k = 2, .seed = 6}, steps);
  }
}

// Rows of three column blocks, the last one narrow: partial rows of the first two go back while
// later ones are computed, where there are enough of them, and combine goes on from there.
TEST(SimtMoeLayer, WideRowsGoHomeByColumnBlocks) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const HostLayer layer = testing::MakeRandomLayer(Spec(2240, 64, 6, recipe), 18);
    for (const std::vector<std::vector<int32_t>>& sizes :
         {std::vector<std::vector<int32_t>>{{9, 1}, {0, 14}, {1, 0}, {30, 21}},
          std::vector<std::vector<int32_t>>{{5, 0, 11}, {2, 3, 1}}}) {
      std::vector<RankLayer::Batches> steps;
      for (const std::vector<int32_t>& tokens : sizes) {
        steps.push_back(Batches(layer.spec, tokens, 3, Routing::kUniform, 60 + steps.size()));
      }
      for (const uint64_t seed : {8, 9}) {
        SCOPED_TRACE(absl::StrCat(sizes[0].size(), " ranks, seed ", seed));
        ExpectRightSteps(layer, PlacementOf(6, static_cast<int32_t>(sizes[0].size())),
                         {.num_ctas = 3, .max_tokens = 30, .max_top_k = 3, .seed = seed}, steps);
      }
    }
  }
}

// Each rank starts a step as soon as its own last one has ended.
TEST(SimtMoeLayer, StepsOfDifferentSizesFollowEachOtherWithoutMeeting) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(128, 64, 6, Recipe::kMxfp4), 2);
  const std::vector<std::vector<int32_t>> tokens = {{2, 9},  {0, 3}, {12, 0}, {1, 1},
                                                    {7, 20}, {0, 0}, {20, 5}};
  std::vector<RankLayer::Batches> steps;
  for (size_t s = 0; s < tokens.size(); ++s) {
    steps.push_back(Batches(layer.spec, tokens[s], 3, Routing::kUniform, 20 + s));
  }
  for (const uint64_t seed : {3, 4, 5}) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RankLayer run(layer, PlacementOf(6, 2), {.max_tokens = 20, .max_top_k = 3, .seed = seed});
    const auto outputs = run.Run(steps);
    ASSERT_EQ(run.error(), "");
    for (size_t s = 0; s < steps.size(); ++s) ExpectRight(layer, steps[s], outputs[s]);
  }
}

// A rank with few tokens is home to records, one with many to flagged rows, in the same step.
TEST(SimtMoeLayer, BitsAreThoseOfAWholeRowHoweverItCrosses) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(320, 128, 6, Recipe::kNvfp4), 15);
  const HostBatch all = testing::MakeRandomBatch(layer.spec, 12, 4, Routing::kUniform, 16);
  const HostBatch few = testing::SelectRows(all, 320, {11, 4});
  for (const bool bf16 : {false, true}) {
    SCOPED_TRACE(bf16 ? "BF16" : "F32");
    RankLayer run(layer, PlacementOf(6, 2),
                  {.num_ctas = 3, .max_tokens = 12, .max_top_k = 4, .partials_bf16 = bf16});
    const auto outputs = run.Run({{all, few}, {few, all}, {few, few}});
    ASSERT_EQ(run.error(), "");
    const std::vector<float>& whole = outputs[0][0];
    ExpectRight(layer, {all, few}, outputs[0]);
    const auto is_same = [&](const std::vector<float>& rows, int row, int of_whole) {
      return std::equal(rows.begin() + row * 320, rows.begin() + (row + 1) * 320,
                        whole.begin() + of_whole * 320);
    };
    for (const auto* rows : {&outputs[0][1], &outputs[1][0], &outputs[2][0], &outputs[2][1]}) {
      EXPECT_TRUE(is_same(*rows, 0, 11));
      EXPECT_TRUE(is_same(*rows, 1, 4));
    }
    EXPECT_TRUE(SameBits({outputs[1][1]}, {whole}));
  }
}

// Rows of two column blocks, with many routes: when the list ends the announcing warp may have come
// to any token of the first.
TEST(SimtMoeLayer, WhatIsNotReturnedWhenTheListEndsIsReturnedByCombine) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(1216, 64, 12, Recipe::kMxfp4), 17);
  std::vector<RankLayer::Batches> steps;
  for (const int32_t top_k : {14, 20, 32}) {
    steps.push_back(Batches(layer.spec, {9, 16}, top_k, Routing::kSkewed, 18));
  }
  for (const bool bf16 : {false, true}) {
    for (const uint64_t seed : {8, 9}) {
      SCOPED_TRACE(absl::StrCat(bf16 ? "BF16" : "F32", ", seed ", seed));
      ExpectRightSteps(
          layer, PlacementOf(12, 2),
          {.num_ctas = 2, .max_tokens = 16, .max_top_k = 32, .partials_bf16 = bf16, .seed = seed},
          steps);
    }
  }
}

TEST(SimtMoeLayer, ARowsBitsDependNeitherOnItsNeighboursNorOnTheGrid) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(192, 128, 6, Recipe::kMxfp4), 3);
  const HostBatch all = testing::MakeRandomBatch(layer.spec, 40, 3, Routing::kSkewed, 9);
  RankLayer whole(layer, PlacementOf(6, 2), {.num_ctas = 3, .max_tokens = 40, .max_top_k = 3});
  const HostBatch none = testing::SelectRows(all, 192, {});
  const auto expected = whole.Run({{all, none}})[0][0];
  ASSERT_EQ(whole.error(), "");
  const std::vector<int32_t> rows = {39, 3, 17, 0};
  const HostBatch some = testing::SelectRows(all, 192, rows);
  RankLayer part(layer, PlacementOf(6, 2), {.num_ctas = 1, .max_tokens = 40, .max_top_k = 3});
  const auto outputs = part.Run({{none, some}})[0][1];  // another rank is home
  ASSERT_EQ(part.error(), "");
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_TRUE(std::equal(outputs.begin() + i * 192, outputs.begin() + (i + 1) * 192,
                           expected.begin() + rows[i] * 192))
        << "row " << rows[i];
  }
}

// K of many stages, whose end is half a unit: the rings go round, with narrow and wide token tiles.
TEST(SimtMoeLayer, LongSumsGoRoundTheRings) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const HostLayer layer = testing::MakeRandomLayer(Spec(1344, 832, 2, recipe), 11);
    for (const int32_t tokens : {1, 30, 100}) {
      SCOPED_TRACE(absl::StrCat(recipe == Recipe::kMxfp4 ? "mxfp4" : "nvfp4", " T = ", tokens));
      const auto batches = Batches(layer.spec, {tokens}, 1, Routing::kUniform, 12);
      RankLayer run(layer, PlacementOf(2, 1),
                    {.num_ctas = 2, .max_tokens = tokens, .max_top_k = 1, .seed = 13});
      const auto outputs = run.Run({batches});
      ASSERT_EQ(run.error(), "");
      ExpectRight(layer, batches, outputs[0]);
    }
  }
}

// EXPERTD_FUZZ_ROUNDS and EXPERTD_FUZZ_SEED: more, and others.
int FromEnvironment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

TEST(SimtMoeLayer, FuzzedShapesAgreeWithTheReference) {
  const int rounds = FromEnvironment("EXPERTD_FUZZ_ROUNDS", 6);
  const int seed = FromEnvironment("EXPERTD_FUZZ_SEED", 20261130);
  for (int round = 0; round < rounds; ++round) {
    std::mt19937 random(seed + round);
    const auto pick = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    const int32_t ranks = pick(1, 4);
    const int32_t experts = pick(1, 12);
    const int32_t top_k = pick(1, 6);
    const LayerSpec spec = Spec(64 * pick(1, 6), 64 * pick(1, 3), experts,
                                pick(0, 1) == 0 ? Recipe::kMxfp4 : Recipe::kNvfp4);
    const int32_t own = (experts + ranks - 1) / ranks;
    const int32_t slots = pick(0, 2) == 0 ? std::min(own + 1, experts) : 0;
    const auto routing = static_cast<Routing>(pick(0, 4));
    const int num_ctas = pick(1, 4);
    const bool shares_sort = pick(0, 1) == 0;
    RankLayer::Options options = {.num_ctas = num_ctas,
                                  .max_tokens = 40,
                                  .max_top_k = top_k,
                                  .partials_bf16 = pick(0, 3) == 0,
                                  .seed = static_cast<uint64_t>(seed + round)};
    if (shares_sort) options.own_sort_routes = -1;
    SCOPED_TRACE(absl::StrCat("round ", round, ": ", ranks, " ranks, ", experts, " experts, K ",
                              top_k, ", H ", spec.hidden_size, ", I ", spec.intermediate_size, ", ",
                              num_ctas, " CTAs, ", testing::RoutingName(routing)));
    const HostLayer layer = testing::MakeRandomLayer(spec, round);
    std::vector<RankLayer::Batches> steps;
    for (int s = 0; s < 2; ++s) {
      std::vector<int32_t> tokens(ranks);
      for (int32_t& count : tokens) count = pick(0, 2) == 0 ? pick(0, 2) : pick(0, 40);
      steps.push_back(Batches(spec, tokens, top_k, routing, 50 + s));
    }
    RankLayer run(layer, PlacementOf(experts, ranks, slots), options);
    const auto outputs = run.Run(steps);
    ASSERT_EQ(run.error(), "");
    for (size_t s = 0; s < steps.size(); ++s) ExpectRight(layer, steps[s], outputs[s]);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace expertd
