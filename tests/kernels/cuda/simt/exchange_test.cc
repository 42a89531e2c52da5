#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu/testing/moe_cases.h"
#include "tests/kernels/cuda/simt/layer_steps.h"
#include "tests/kernels/cuda/simt/rank_layer.h"

// What ranks tell each other in a step: records that come in any order or are of an older step, and
// a rank that does not do its part.
namespace expertd {
namespace {

using simt::Batches;
using simt::ExpectRight;
using simt::ExpectRightSteps;
using simt::PlacementOf;
using simt::RankLayer;
using simt::Spec;
using testing::HostLayer;
using testing::Routing;

// Each step leaves records of partial rows where the next one's arrive, in any order.
TEST(SimtExchange, RecordsOfAnOlderStepAreNotTaken) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(320, 64, 6, Recipe::kMxfp4), 14);
  std::vector<RankLayer::Batches> steps;
  for (uint64_t s = 0; s < 5; ++s) {
    steps.push_back(Batches(layer.spec, {3, 1, 2}, 4, Routing::kUniform, 30 + s));
  }
  for (const bool bf16 : {false, true}) {
    for (const uint64_t seed : {6, 7}) {
      SCOPED_TRACE(absl::StrCat(bf16 ? "BF16" : "F32", ", seed ", seed));
      ExpectRightSteps(
          layer, PlacementOf(6, 3),
          {.num_ctas = 3, .max_tokens = 3, .max_top_k = 4, .partials_bf16 = bf16, .seed = seed},
          steps);
    }
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

class SimtExchangeStallTest : public ::testing::TestWithParam<Stall> {};

INSTANTIATE_TEST_SUITE_P(Points, SimtExchangeStallTest, ::testing::ValuesIn(kStalls),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(SimtExchangeStallTest, EndsEveryKernelAndIsNamedByWhoWaits) {
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
TEST(SimtExchange, WhatAPeerSaidInAnOlderStepIsNotTaken) {
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
TEST(SimtExchange, RecordsMayComeInAnyOrder) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(64, 64, 6, Recipe::kMxfp4), 7);
  std::vector<RankLayer::Batches> steps;
  for (const uint64_t seed : {44, 45, 46}) {
    steps.push_back(Batches(layer.spec, {3, 5}, 3, Routing::kMasked, seed));
  }
  for (const int own_sort_routes : {layout::kOwnSortRoutes, -1}) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      SCOPED_TRACE(absl::StrCat("sort of ", own_sort_routes, ", seed ", seed));
      ExpectRightSteps(
          layer, PlacementOf(6, 2),
          {.max_tokens = 5, .max_top_k = 3, .seed = seed, .own_sort_routes = own_sort_routes},
          steps);
    }
  }
}

TEST(SimtExchange, TheStopWordEndsARankThatWaits) {
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
