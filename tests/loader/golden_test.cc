// The golden checkpoints, from directory to matrices.

#include <fstream>
#include <iterator>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/checkpoint.h"
#include "loader/load_plan.h"
#include "loader/weight_loader.h"
#include "tests/testing/memory_sink.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;
using testing::MemorySink;

std::filesystem::path Golden(const std::string& name) {
  return std::filesystem::path(EXPERTD_TEST_VECTORS) / name / "checkpoint";
}

TEST(GoldenTest, DeepSeekV4Mxfp4LoadsWhole) {
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(Golden("v4-mxfp4"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->family(), "deepseek-v4 (mxfp4)");
  ASSERT_EQ(checkpoint->layers().size(), 2u);
  const absl::StatusOr<Placement> placement = Placement::Contiguous(8, 2);
  ASSERT_TRUE(placement.ok());
  const LoadPlan plan = MakeLoadPlan(*checkpoint, *placement, 0, 2);
  EXPECT_EQ(plan.reads.size(), 2u * 8 * 3);
  MemorySink sink(checkpoint->layers(), *placement, 0, 2);
  const absl::Status status = LoadWeights(*checkpoint, plan, sink);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(sink.finished());
  EXPECT_EQ(sink.num_matrices(), plan.reads.size());
  EXPECT_EQ(sink.Get({0, 0, 0, Matrix::kGate}).second_level, 1.0f);
}

}  // namespace
}  // namespace expertd
