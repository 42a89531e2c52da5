#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu/testing/moe_cases.h"
#include "tests/kernels/cuda/simt/rank_layer.h"

// The sort of a step's routes: by every CTA for itself, and by all CTAs of a rank together. Both
// are compared with a stable sort on the host, and with each other by the step's outputs.
namespace expertd {
namespace {

using simt::RankLayer;
using testing::Routing;

constexpr int kAlways = -1;  // RankLayer::Options::own_sort_routes: the CTAs share
constexpr int kHidden = 64;

struct Case {
  const char* name;
  std::vector<int32_t> tokens;  // by rank
  int num_ctas = 2;
  int32_t top_k = 3;
  Routing routing = Routing::kUniform;
  int32_t experts = 6;
  int32_t slots = 0;  // of a rank, redundant; 0: contiguous
};

const Case kCases[] = {
    {"NothingToSort", {0}},
    {"OneRoute", {1}, 3, 1},
    {"OneRank", {50}, 3},
    {"OneCta", {50}, 1},
    {"OneRankMasked", {45}, 3, 4, Routing::kMasked},
    {"OneRankAllMasked", {45}, 2, 3, Routing::kAllMasked},
    {"OneRankAllToOne", {70}, 2, 1, Routing::kOneExpert},
    {"CtasWithoutAPart", {12}, 4},
    {"MoreCtasThanRoutes", {1}, 5},
    {"MoreSlotsThanLanes", {60}, 2, 3, Routing::kUniform, 70},
    {"WarpsWithSeveralRuns", {90}, 2, 32, Routing::kSkewed},
    {"TwoRanks", {60, 33}, 3},
    {"TwoRanksReplicas", {40, 30}, 2, 4, Routing::kSkewed, 6, 5},
    {"TwoRanksAllToOne", {31, 50}, 3, 3, Routing::kOneExpert},
    {"TwoRanksNothingOnOne", {0, 40}, 3},
    {"EightRanks", {9, 0, 20, 3, 14, 1, 7, 30}, 2, 3, Routing::kMasked, 16},
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// What a rank's CTAs have to find: routes by slot in route order, and the slot of each route.
struct Sorted {
  std::vector<uint32_t> routes;
  std::vector<uint16_t> slots;
};

Sorted SortOnHost(const RankLayer::Batches& batches, const Placement& placement, int rank) {
  std::vector<std::vector<uint32_t>> by_slot(placement.slots_per_rank());
  Sorted sorted;
  for (const testing::HostBatch& batch : batches) {
    for (int32_t i = 0; i < batch.num_tokens * batch.top_k; ++i) {
      const auto route = static_cast<uint32_t>(sorted.slots.size());
      sorted.slots.push_back(layout::kNowhere);
      if (batch.ids[i] < 0) continue;
      const auto replicas = placement.SlotsOf(batch.ids[i]);
      const int32_t slot = replicas[batch.row_in_request[i / batch.top_k] % replicas.size()];
      const int owner = slot / placement.slots_per_rank();
      sorted.slots.back() = static_cast<uint16_t>(slot);
      if (owner == rank) by_slot[slot % placement.slots_per_rank()].push_back(route);
    }
  }
  for (const auto& routes : by_slot) {
    sorted.routes.insert(sorted.routes.end(), routes.begin(), routes.end());
  }
  return sorted;
}

LayerSpec Spec(int32_t experts) {
  return {.hidden_size = kHidden,
          .intermediate_size = 64,
          .num_experts = experts,
          .top_k = 3,
          .recipe = Recipe::kMxfp4,
          .swiglu_limit = 1.0f};
}

Placement PlacementOf(const Case& c) {
  const auto ranks = static_cast<int32_t>(c.tokens.size());
  auto placement = c.slots == 0 ? Placement::Contiguous(c.experts, ranks)
                                : Placement::Redundant(c.experts, ranks, c.slots);
  EXPECT_TRUE(placement.ok()) << placement.status();
  return *std::move(placement);
}

RankLayer::Batches Batches(const LayerSpec& spec, const Case& c, uint64_t seed) {
  RankLayer::Batches batches;
  for (size_t rank = 0; rank < c.tokens.size(); ++rank) {
    batches.push_back(
        testing::MakeRandomBatch(spec, c.tokens[rank], c.top_k, c.routing, seed * 100 + rank));
  }
  return batches;
}

RankLayer::Options OptionsOf(const Case& c, int own_sort_routes, bool far_lists = false) {
  return {.num_ctas = c.num_ctas,
          .max_tokens = std::max(1, *std::max_element(c.tokens.begin(), c.tokens.end())),
          .max_top_k = c.top_k,
          .own_sort_routes = own_sort_routes,
          .far_lists = far_lists};
}

void ExpectList(const RankLayer& run, int rank, int list, const Sorted& expected) {
  const uint32_t* routes = run.routes(rank, list);
  const uint16_t* slots = run.slots(rank, list);
  EXPECT_TRUE(std::equal(expected.routes.begin(), expected.routes.end(), routes));
  EXPECT_TRUE(std::equal(expected.slots.begin(), expected.slots.end(), slots));
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

class SimtSortTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Cases, SimtSortTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(SimtSortTest, CtasFindTheSameOrderAloneAndTogether) {
  const Case& c = GetParam();
  const testing::HostLayer layer = testing::MakeRandomLayer(Spec(c.experts), 11);
  const Placement placement = PlacementOf(c);
  const auto batches = Batches(layer.spec, c, 12);
  RankLayer alone(layer, placement, OptionsOf(c, layout::kOwnSortRoutes, /*far_lists=*/true));
  const auto expected = alone.Run({batches});
  ASSERT_EQ(alone.error(), "");
  RankLayer near(layer, placement, OptionsOf(c, layout::kOwnSortRoutes));
  const auto near_outputs = near.Run({batches});
  ASSERT_EQ(near.error(), "");
  RankLayer together(layer, placement, OptionsOf(c, kAlways));
  const auto outputs = together.Run({batches});
  ASSERT_EQ(together.error(), "");
  for (int rank = 0; rank < placement.num_ranks(); ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    EXPECT_EQ(together.fault(rank).code, 0u);
    const Sorted sorted = SortOnHost(batches, placement, rank);
    for (int cta = 0; cta < c.num_ctas; ++cta) ExpectList(alone, rank, cta, sorted);
    ExpectList(together, rank, -1, sorted);
    EXPECT_TRUE(SameBits(outputs[0][rank], expected[0][rank]));
    EXPECT_TRUE(SameBits(near_outputs[0][rank], expected[0][rank]));
  }
}

// Flags and counts of one step are no other's: long and short ones in turns, none is reset.
TEST(SimtSort, LongAndShortStepsFollowEachOther) {
  const Case c = {"", {40, 40}, 3};
  const testing::HostLayer layer = testing::MakeRandomLayer(Spec(6), 13);
  const Placement placement = PlacementOf(c);
  std::vector<RankLayer::Batches> steps;
  for (const auto& tokens :
       std::vector<std::vector<int32_t>>{{40, 9}, {2, 3}, {30, 31}, {33, 0}, {0, 1}, {20, 40}}) {
    Case step = c;
    step.tokens = tokens;
    steps.push_back(Batches(layer.spec, step, 14 + steps.size()));
  }
  RankLayer alone(layer, placement, OptionsOf(c, layout::kOwnSortRoutes));
  const auto expected = alone.Run(steps);
  ASSERT_EQ(alone.error(), "");
  RankLayer mixed(layer, placement, OptionsOf(c, 60));
  const auto outputs = mixed.Run(steps);
  ASSERT_EQ(mixed.error(), "");
  for (size_t s = 0; s < steps.size(); ++s) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(SameBits(outputs[s][rank], expected[s][rank]))
          << "step " << s << " rank " << rank;
    }
  }
}

// --- a CTA that does not come

// Every element is right or was never written.
void ExpectNothingWrong(const std::vector<float>& outputs, const std::vector<float>& expected) {
  ASSERT_EQ(outputs.size(), expected.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!std::isnan(outputs[i])) {
      ASSERT_EQ(outputs[i], expected[i]) << i;
    }
  }
}

struct Stall {
  const char* name;
  cuda::moe_layer::StallPoint point;
  std::vector<int32_t> tokens;  // by rank; CTA 0 of the last rank stays away
};

const Stall kStalls[] = {
    {"Count", cuda::moe_layer::kStallCount, {40}},
    {"Place", cuda::moe_layer::kStallPlace, {40}},
    {"CountOfTwoRanks", cuda::moe_layer::kStallCount, {25, 20}},
    {"PlaceOfTwoRanks", cuda::moe_layer::kStallPlace, {25, 20}},
};

void PrintTo(const Stall& stall, std::ostream* out) { *out << stall.name; }

class SimtSortStallTest : public ::testing::TestWithParam<Stall> {};

INSTANTIATE_TEST_SUITE_P(Points, SimtSortStallTest, ::testing::ValuesIn(kStalls),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(SimtSortStallTest, EndsEveryKernelAndNamesTheCta) {
  const Stall& stall = GetParam();
  const Case c = {"", stall.tokens, 3};
  const int stalled = static_cast<int>(stall.tokens.size()) - 1;
  const testing::HostLayer layer = testing::MakeRandomLayer(Spec(6), 15);
  const auto batches = Batches(layer.spec, c, 16);
  RankLayer undisturbed(layer, PlacementOf(c), OptionsOf(c, kAlways));
  const auto expected = undisturbed.Run({batches});
  ASSERT_EQ(undisturbed.error(), "");

  RankLayer::Options options = OptionsOf(c, kAlways);
  options.timeout_ns = 500'000;
  options.stalled_rank = stalled;
  options.stall = stall.point;
  RankLayer run(layer, PlacementOf(c), options);
  const auto outputs = run.Run({batches});
  ASSERT_EQ(run.error(), "");  // they ended
  const cuda::moe_layer::FaultRecord& record = run.fault(stalled);
  EXPECT_EQ(record.code, cuda::moe_layer::kWaitSort);
  EXPECT_EQ(record.tile, 0u);
  EXPECT_EQ(record.peer, static_cast<uint32_t>(stalled));
  EXPECT_EQ(record.found, 0u);
  EXPECT_EQ(record.expected, 1u);
  EXPECT_GE(record.waited_us, 500u);
  EXPECT_EQ(record.complete, 1u);
  for (const float value : outputs[0][stalled]) ASSERT_TRUE(std::isnan(value));
  for (int rank = 0; rank <= stalled; ++rank) {
    EXPECT_NE(run.fault(rank).code, 0u) << rank;
    ExpectNothingWrong(outputs[0][rank], expected[0][rank]);
  }
}

// The routes of rank 1 never come. At first no CTA of rank 0 has what it would bring to the
// meeting; then only those have it whose part is rank 0's own, and they wait for the others.
TEST(SimtSort, WhoGaveUpWaitingForRoutesComesToNoMeeting) {
  const Case c = {"", {25, 20}, 3};
  const testing::HostLayer layer = testing::MakeRandomLayer(Spec(6), 17);
  RankLayer::Options options = OptionsOf(c, kAlways);
  options.timeout_ns = 500'000;
  options.stalled_rank = 1;
  for (const auto stall : {cuda::moe_layer::kStallRoutes, cuda::moe_layer::kStallRecords}) {
    SCOPED_TRACE(stall);
    options.stall = stall;
    RankLayer run(layer, PlacementOf(c), options);
    const auto outputs = run.Run({Batches(layer.spec, c, 18)});
    ASSERT_EQ(run.error(), "");
    EXPECT_EQ(run.fault(0).code, cuda::moe_layer::kWaitRoutes);
    EXPECT_EQ(run.fault(0).peer, 1u);
    for (const float value : outputs[0][0]) ASSERT_TRUE(std::isnan(value));
  }
}

TEST(SimtSort, TheStopWordEndsAMeeting) {
  const Case c = {"", {40}, 3};
  const testing::HostLayer layer = testing::MakeRandomLayer(Spec(6), 19);
  RankLayer::Options options = OptionsOf(c, kAlways);
  options.timeout_ns = 50'000'000;
  options.stalled_rank = 0;
  options.stall = cuda::moe_layer::kStallCount;
  RankLayer run(layer, PlacementOf(c), options);
  run.Stop(0);
  const auto outputs = run.Run({Batches(layer.spec, c, 20)});
  ASSERT_EQ(run.error(), "");
  EXPECT_EQ(run.fault(0).code, cuda::moe_layer::kStopped);
  EXPECT_LT(run.fault(0).waited_us, 50'000u);
  for (const float value : outputs[0][0]) ASSERT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace expertd
