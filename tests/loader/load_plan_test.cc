#include "loader/load_plan.h"

#include <set>
#include <string>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/checkpoint.h"

namespace expertd {
namespace {

class LoadPlanTest : public ::testing::Test {
 protected:
  LoadPlanTest()
      : checkpoint_(Checkpoint::Open(std::filesystem::path(EXPERTD_TEST_VECTORS) / "v4-nvfp4" /
                                     "checkpoint")) {}
  void SetUp() override { ASSERT_TRUE(checkpoint_.ok()) << checkpoint_.status(); }

  const absl::StatusOr<Checkpoint> checkpoint_;  // E 6, layers 0 1 (nvfp4) 2 (mxfp4), two files
};

TEST_F(LoadPlanTest, EverySlotOfTheProcessAppearsOnceWithEveryMatrix) {
  const absl::StatusOr<Placement> placement = Placement::Contiguous(6, 4);
  ASSERT_TRUE(placement.ok());
  const LoadPlan plan = MakeLoadPlan(*checkpoint_, *placement, 1, 2);
  std::set<std::tuple<int32_t, int32_t, int32_t, int>> ids;
  for (const PlannedRead& read : plan.reads) {
    EXPECT_EQ(read.expert, placement->ExpertAt(1 + read.id.rank, read.id.slot));
    EXPECT_TRUE(
        ids.emplace(read.id.rank, read.id.layer, read.id.slot, static_cast<int>(read.id.matrix))
            .second);
  }
  EXPECT_EQ(ids.size(), 3u * 4 * 3);  // layers x slots of ranks 1 and 2 x matrices
}

TEST_F(LoadPlanTest, EmptySlotsAreSkipped) {
  const absl::StatusOr<Placement> placement = Placement::Contiguous(6, 4);
  ASSERT_TRUE(placement.ok());
  EXPECT_TRUE(MakeLoadPlan(*checkpoint_, *placement, 3, 1).reads.empty());  // 2 a rank: 0-5 are out
}

TEST_F(LoadPlanTest, ReadsComeInFileOrder) {
  const absl::StatusOr<Placement> placement = Placement::Contiguous(6, 2);
  ASSERT_TRUE(placement.ok());
  const LoadPlan plan = MakeLoadPlan(*checkpoint_, *placement, 0, 2);
  for (size_t i = 1; i < plan.reads.size(); ++i) {
    const FileRange& before = plan.reads[i - 1].location.codes;
    const FileRange& range = plan.reads[i].location.codes;
    EXPECT_LT(std::make_pair(before.file, before.offset), std::make_pair(range.file, range.offset));
  }
}

TEST_F(LoadPlanTest, TotalIsCodesScalesAndSecondLevels) {
  const absl::StatusOr<Placement> placement = Placement::Contiguous(6, 1);
  ASSERT_TRUE(placement.ok());
  const LoadPlan plan = MakeLoadPlan(*checkpoint_, *placement, 0, 1);
  const int64_t weights = 128 * 128;
  EXPECT_EQ(plan.total_bytes, 6 * 3 *
                                  (2 * (weights / 2 + weights / 16 + 4) +  // NVFP4 layers
                                   (weights / 2 + weights / 32)));         // mtp.0
}

TEST_F(LoadPlanTest, SharesSayWhatEachRankReads) {
  const absl::StatusOr<Placement> placement = Placement::Redundant(6, 2, 4);
  ASSERT_TRUE(placement.ok());
  const LoadPlan plan = MakeLoadPlan(*checkpoint_, *placement, 0, 2);
  const std::vector<RankShare> shares = SharesOf(*checkpoint_, plan, 0, 2);
  ASSERT_EQ(shares.size(), 2u);
  EXPECT_EQ(shares[0].experts, (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(shares[1].experts, (std::vector<int32_t>{0, 1, 4, 5}));
  EXPECT_EQ(shares[1].rank, 1);
  EXPECT_EQ(shares[1].matrices, 36);
  EXPECT_EQ(shares[0].bytes + shares[1].bytes, plan.total_bytes);
  EXPECT_EQ(shares[0].files.size(), 2u);
}

}  // namespace
}  // namespace expertd
