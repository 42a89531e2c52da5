#include "config/cluster_spec.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(PlacementTest, ContiguousGivesTheLastRankFewer) {
  const auto placement = Placement::Contiguous(10, 4);
  ASSERT_TRUE(placement.ok());
  EXPECT_EQ(placement->slots_per_rank(), 3);
  EXPECT_EQ(placement->ExpertAt(0, 0), 0);
  EXPECT_EQ(placement->ExpertAt(3, 0), 9);
  EXPECT_EQ(placement->ExpertAt(3, 1), -1);
  EXPECT_THAT(placement->SlotsOf(9), ElementsAre(9));
}

TEST(PlacementTest, RedundantSlotsAreChosenByRowWithinItsRequest) {
  const auto placement = Placement::Redundant(4, 2, 4);
  ASSERT_TRUE(placement.ok());
  EXPECT_THAT(placement->SlotsOf(1), ElementsAre(1, 5));
  EXPECT_EQ(placement->SlotFor(1, 0), 1);
  EXPECT_EQ(placement->SlotFor(1, 1), 5);
  EXPECT_EQ(placement->SlotFor(1, 2), 1);
}

TEST(PlacementTest, AnExpertWithoutASlotIsRefused) {
  const auto placement = Placement::FromTable(3, 1, {0, 2});
  ASSERT_FALSE(placement.ok());
  EXPECT_THAT(std::string(placement.status().message()), HasSubstr("expert 1 has no slot"));
}

}  // namespace
}  // namespace expertd
