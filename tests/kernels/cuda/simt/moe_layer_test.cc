#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/reference/reference.h"
#include "tests/gpu/testing/moe_cases.h"
#include "tests/kernels/cuda/simt/rank_layer.h"

// The fused kernel's own code on emulated GPUs: tiny shapes, several ranks, in orders that seeds
// decide.
namespace expertd {
namespace {

using simt::RankLayer;
using testing::HostBatch;
using testing::HostLayer;
using testing::Routing;

constexpr double kBound = 5e-3;  // as on a GPU

LayerSpec Spec(int64_t hidden, int64_t intermediate, int32_t experts, Recipe recipe) {
  return {.hidden_size = hidden,
          .intermediate_size = intermediate,
          .num_experts = experts,
          .top_k = 3,
          .recipe = recipe,
          .swiglu_limit = 1.0f};
}

Placement PlacementOf(int32_t experts, int32_t ranks, int32_t slots = 0) {
  auto placement = slots == 0 ? Placement::Contiguous(experts, ranks)
                              : Placement::Redundant(experts, ranks, slots);
  EXPECT_TRUE(placement.ok()) << placement.status();
  return *std::move(placement);
}

RankLayer::Batches Batches(const LayerSpec& spec, const std::vector<int32_t>& tokens, int32_t top_k,
                           Routing routing, uint64_t seed) {
  RankLayer::Batches batches;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    batches.push_back(
        testing::MakeRandomBatch(spec, tokens[rank], top_k, routing, seed * 100 + rank));
  }
  return batches;
}

void ExpectRight(const HostLayer& layer, const RankLayer::Batches& batches,
                 const std::vector<std::vector<float>>& outputs) {
  for (size_t rank = 0; rank < batches.size(); ++rank) {
    if (batches[rank].num_tokens == 0) continue;
    EXPECT_LT(reference::RelL2(outputs[rank], testing::ReferenceRows(layer, batches[rank])), kBound)
        << "rank " << rank;
  }
}

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
    {"TwoRanksSomeChunksOfRoutes", Recipe::kMxfp4, {80, 130}, Routing::kSkewed, 32, 3},
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

// Each step leaves records of partial rows where the next one's arrive, in any order.
TEST(SimtMoeLayer, RecordsOfAnOlderStepAreNotTaken) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(320, 64, 6, Recipe::kMxfp4), 14);
  std::vector<RankLayer::Batches> steps;
  for (uint64_t s = 0; s < 5; ++s) {
    steps.push_back(Batches(layer.spec, {3, 1, 2}, 4, Routing::kUniform, 30 + s));
  }
  for (const bool bf16 : {false, true}) {
    for (const uint64_t seed : {6, 7}) {
      SCOPED_TRACE(absl::StrCat(bf16 ? "BF16" : "F32", ", seed ", seed));
      RankLayer run(
          layer, PlacementOf(6, 3),
          {.num_ctas = 3, .max_tokens = 3, .max_top_k = 4, .partials_bf16 = bf16, .seed = seed});
      const auto outputs = run.Run(steps);
      ASSERT_EQ(run.error(), "");
      for (size_t s = 0; s < steps.size(); ++s) ExpectRight(layer, steps[s], outputs[s]);
    }
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

// Rows of five slices with so many routes that they are returned a few slices at a time: when the
// list ends a token may have been begun at any of them.
TEST(SimtMoeLayer, ATokenBegunWhenTheListEndsIsFinishedByCombine) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(1216, 64, 12, Recipe::kMxfp4), 17);
  std::vector<RankLayer::Batches> steps;
  for (const int32_t top_k : {14, 20, 32}) {
    steps.push_back(Batches(layer.spec, {9, 16}, top_k, Routing::kSkewed, 18));
  }
  for (const bool bf16 : {false, true}) {
    for (const uint64_t seed : {8, 9}) {
      SCOPED_TRACE(absl::StrCat(bf16 ? "BF16" : "F32", ", seed ", seed));
      RankLayer run(
          layer, PlacementOf(12, 2),
          {.num_ctas = 2, .max_tokens = 16, .max_top_k = 32, .partials_bf16 = bf16, .seed = seed});
      const auto outputs = run.Run(steps);
      ASSERT_EQ(run.error(), "");
      for (size_t s = 0; s < steps.size(); ++s) ExpectRight(layer, steps[s], outputs[s]);
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

struct Stall {
  const char* name;
  cuda::moe_layer::StallPoint stall;
  std::vector<int32_t> tokens;
  int waiting_rank;  // who must say so
  uint32_t code;     // and how
  uint32_t peer;     // for whom it waited
};

const Stall kStalls[] = {
    {"Routes", cuda::moe_layer::kStallRoutes, {4, 4}, 0, cuda::moe_layer::kWaitRoutes, 1},
    {"Records", cuda::moe_layer::kStallRecords, {4, 4}, 0, cuda::moe_layer::kWaitRoutes, 1},
    {"FewTokens", cuda::moe_layer::kStallTokens, {2, 2}, 0, cuda::moe_layer::kWaitTokens, 1},
    {"ManyTokens", cuda::moe_layer::kStallTokens, {20, 20}, 0, cuda::moe_layer::kWaitTokens, 1},
    {"Fc1", cuda::moe_layer::kStallFc1, {6, 6}, 1, cuda::moe_layer::kWaitFc1, 1},
    {"Fc2", cuda::moe_layer::kStallFc2, {6, 6}, 1, cuda::moe_layer::kWaitFc2, 1},
    {"Partials", cuda::moe_layer::kStallPartials, {6, 6}, 0, cuda::moe_layer::kWaitPartials, 1},
    {"FewPartials", cuda::moe_layer::kStallPartials, {2, 2}, 0, cuda::moe_layer::kWaitPartials, 1},
    {"PartialsOfFewBesideMany",
     cuda::moe_layer::kStallPartials,
     {2, 9},
     0,
     cuda::moe_layer::kWaitPartials,
     1},
};

void PrintTo(const Stall& stall, std::ostream* out) { *out << stall.name; }

class SimtMoeLayerStallTest : public ::testing::TestWithParam<Stall> {};

INSTANTIATE_TEST_SUITE_P(Points, SimtMoeLayerStallTest, ::testing::ValuesIn(kStalls),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(SimtMoeLayerStallTest, EndsEveryKernelAndIsNamedByWhoWaits) {
  const Stall& stall = GetParam();
  const HostLayer layer = testing::MakeRandomLayer(Spec(128, 128, 6, Recipe::kMxfp4), 4);
  RankLayer run(layer, PlacementOf(6, 2),
                {.max_tokens = 20,
                 .max_top_k = 3,
                 .timeout_ns = 2'000'000,
                 .stalled_rank = 1,
                 .stall = stall.stall});
  run.Run({Batches(layer.spec, stall.tokens, 3, Routing::kUniform, 5)});
  ASSERT_EQ(run.error(), "");  // they ended
  const cuda::moe_layer::FaultRecord& record = run.fault(stall.waiting_rank);
  EXPECT_EQ(record.code, stall.code);
  EXPECT_EQ(record.peer, stall.peer);
  EXPECT_EQ(record.step, 1u);
  EXPECT_EQ(record.expected, 1u);
  EXPECT_EQ(record.found, 0u);
  EXPECT_GE(record.waited_us, 2000u);
  EXPECT_EQ(record.complete, 1u);
}

// What a peer says of its routes has two buffers: in step 3 that of step 1 is still there.
TEST(SimtMoeLayer, WhatAPeerSaidInAnOlderStepIsNotTaken) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(128, 64, 6, Recipe::kMxfp4), 6);
  std::vector<RankLayer::Batches> steps;
  for (const uint64_t seed : {41, 42, 43}) {
    steps.push_back(Batches(layer.spec, {4, 4}, 3, Routing::kUniform, seed));
  }
  for (const auto stall : {cuda::moe_layer::kStallRoutes, cuda::moe_layer::kStallRecords}) {
    SCOPED_TRACE(stall);
    RankLayer run(layer, PlacementOf(6, 2),
                  {.max_tokens = 4,
                   .max_top_k = 3,
                   .timeout_ns = 500'000,
                   .stalled_rank = 1,
                   .stall = stall,
                   .first_stalled_step = 3});
    const auto outputs = run.Run(steps);
    ASSERT_EQ(run.error(), "");
    for (const int s : {0, 1}) ExpectRight(layer, steps[s], outputs[s]);
    const cuda::moe_layer::FaultRecord& record = run.fault(0);
    EXPECT_EQ(record.code, cuda::moe_layer::kWaitRoutes);
    EXPECT_EQ(record.peer, 1u);
    EXPECT_EQ(record.step, 3u);
    EXPECT_EQ(record.found, 1u);
    EXPECT_EQ(record.expected, 3u);
    EXPECT_EQ(record.tile > 0, stall == cuda::moe_layer::kStallRecords);
    EXPECT_LE(record.tile, 12u);  // 1 + a route
    for (const float value : outputs[2][0]) ASSERT_TRUE(std::isnan(value));
  }
}

// Records arrive one by one and as they like, before the header and behind it.
TEST(SimtMoeLayer, RecordsMayComeInAnyOrder) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(64, 64, 6, Recipe::kMxfp4), 7);
  std::vector<RankLayer::Batches> steps;
  for (const uint64_t seed : {44, 45, 46}) {
    steps.push_back(Batches(layer.spec, {3, 5}, 3, Routing::kMasked, seed));
  }
  for (const int own_sort_routes : {layout::kOwnSortRoutes, -1}) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      SCOPED_TRACE(absl::StrCat("sort of ", own_sort_routes, ", seed ", seed));
      RankLayer run(
          layer, PlacementOf(6, 2),
          {.max_tokens = 5, .max_top_k = 3, .seed = seed, .own_sort_routes = own_sort_routes});
      const auto outputs = run.Run(steps);
      ASSERT_EQ(run.error(), "");
      for (size_t s = 0; s < steps.size(); ++s) ExpectRight(layer, steps[s], outputs[s]);
    }
  }
}

TEST(SimtMoeLayer, TheStopWordEndsARankThatWaits) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(128, 64, 6, Recipe::kMxfp4), 5);
  RankLayer run(layer, PlacementOf(6, 2),
                {.max_tokens = 4,
                 .max_top_k = 3,
                 .timeout_ns = 50'000'000,
                 .stalled_rank = 1,
                 .stall = cuda::moe_layer::kStallRoutes});
  run.Stop(0);
  run.Stop(1);
  run.Run({Batches(layer.spec, {4, 4}, 3, Routing::kUniform, 6)});
  ASSERT_EQ(run.error(), "");
  EXPECT_EQ(run.fault(0).code, cuda::moe_layer::kStopped);
  EXPECT_LT(run.fault(0).waited_us, 50'000u);
}

}  // namespace
}  // namespace expertd
