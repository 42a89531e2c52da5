#include "kernels/cpu/routing.h"

#include <gtest/gtest.h>

#include <vector>

#include "config/limits.h"

namespace expertd::cpu {
namespace {

// Four experts on two ranks: 0 and 1 on rank 0, 2 and 3 on rank 1.
//   token 0: experts 0, 3     token 1: 1, 0 (both rank 0)     token 2: masked, 2
struct Example {
  Example() : placement(*Placement::Contiguous(4, 2)), home({2, 16}, placement) {
    batch.num_tokens = 3;
    batch.ids = ids.data();
    batch.row_in_request = rows.data();
  }
  Placement placement;
  std::vector<int32_t> ids = {0, 3, 1, 0, -1, 2};
  std::vector<int32_t> rows = {0, 1, 2};
  RankBatch batch;
  HomeRouting home;
};

TEST(HomeRouting, ATokenIsOneRowForEachOwner) {
  Example e;
  e.home.Build(e.batch, 0, 3, 2);
  EXPECT_EQ(e.home.RowsTo(0), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(e.home.RowsTo(1), (std::vector<int32_t>{0, 2}));
  const auto first = e.home.RoutesTo(0);
  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(first[1].row, 1);
  EXPECT_EQ(first[1].slot, 1);
  EXPECT_EQ(first[2].row, 1);
  EXPECT_EQ(first[2].slot, 0);
  const auto second = e.home.RoutesTo(1);
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(second[1].row, 1);
  EXPECT_EQ(second[1].slot, 0);
}

TEST(HomeRouting, EveryChoiceKnowsWhereItsAnswerComesFrom) {
  Example e;
  e.home.Build(e.batch, 1, 3, 2);  // a later round: tokens 1 and 2
  EXPECT_EQ(e.home.OwnerOf(0, 0).rank, 0);
  EXPECT_EQ(e.home.OwnerOf(0, 0).position, 0);
  EXPECT_EQ(e.home.OwnerOf(0, 1).position, 1);
  EXPECT_EQ(e.home.OwnerOf(1, 0).rank, -1);
  EXPECT_EQ(e.home.OwnerOf(1, 1).rank, 1);
  EXPECT_EQ(e.home.RowsTo(0), (std::vector<int32_t>{1}));
}

TEST(HomeRouting, TheReplicaFollowsTheRowInItsRequest) {
  const Placement placement = *Placement::Redundant(2, 2, 2);  // both experts on both ranks
  HomeRouting home({2, 16}, placement);
  std::vector<int32_t> ids = {1, 1, 1};
  std::vector<int32_t> rows = {0, 1, 2};
  RankBatch batch;
  batch.num_tokens = 3;
  batch.ids = ids.data();
  batch.row_in_request = rows.data();
  home.Build(batch, 0, 3, 1);
  EXPECT_EQ(home.RowsTo(0), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(home.RowsTo(1), (std::vector<int32_t>{1}));
}

TEST(OwnerRouting, GroupsBySlotAndKeepsTheOrderOfArrival) {
  OwnerRouting owned({2, 16}, 3);
  ASSERT_TRUE(owned.Add(std::vector<Route>{{0, 2}, {1, 0}}, 2, 0).ok());
  ASSERT_TRUE(owned.Add(std::vector<Route>{{0, 2}}, 1, 2).ok());
  owned.GroupBySlot();
  EXPECT_EQ(owned.num_routes(), 3);
  ASSERT_EQ(owned.OfSlot(0).size(), 1u);
  EXPECT_EQ(owned.OfSlot(0)[0].row, 1);
  EXPECT_EQ(owned.OfSlot(0)[0].route, 1);
  EXPECT_TRUE(owned.OfSlot(1).empty());
  ASSERT_EQ(owned.OfSlot(2).size(), 2u);
  EXPECT_EQ(owned.OfSlot(2)[0].row, 0);
  EXPECT_EQ(owned.OfSlot(2)[1].row, 2);
  EXPECT_EQ(owned.OfSlot(2)[1].route, 2);
}

TEST(OwnerRouting, RoutesOutsideTheMessageOrTheRankAreRefused) {
  OwnerRouting owned({2, 16}, 3);
  for (const Route& route : std::vector<Route>{{-1, 0}, {2, 0}, {0, -1}, {0, 3}}) {
    EXPECT_FALSE(owned.Add({&route, 1}, 2, 0).ok()) << route.row << " " << route.slot;
  }
  const std::vector<Route> many(2 * 16 * limits::kMaxTopK + 1);
  EXPECT_FALSE(owned.Add(many, 1, 0).ok());
}

TEST(RoundLimits, ARoundIsBoundedAndNeverEmpty) {
  const RoundLimits large{8, 1024};
  EXPECT_EQ(large.TokensPerRound(8), limits::kCpuRoundRoutes / 64);
  EXPECT_EQ(large.MaxRoutesPerHome(), limits::kCpuRoundRoutes / 8);
  const RoundLimits small{1, 4};
  EXPECT_EQ(small.TokensPerRound(1), 4);
  EXPECT_EQ(small.MaxRoutesPerHome(), 4 * limits::kMaxTopK);
  const RoundLimits wide{limits::kMaxRanks, 1024};
  for (int32_t top_k = 1; top_k <= limits::kMaxTopK; ++top_k) {
    EXPECT_GE(wide.TokensPerRound(top_k), 1);
    EXPECT_LE(wide.TokensPerRound(top_k) * top_k, wide.MaxRoutesPerHome());
    EXPECT_LE(wide.TokensPerRound(top_k), wide.MaxRowsPerHome());
  }
}

}  // namespace
}  // namespace expertd::cpu
