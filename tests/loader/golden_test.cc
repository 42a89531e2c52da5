// The golden checkpoints, from directory to matrices. What they compute is tested with the
// reference.

#include <string>

#include "gtest/gtest.h"
#include "loader/checkpoint.h"
#include "loader/load_plan.h"
#include "loader/weight_loader.h"
#include "tests/testing/memory_sink.h"

namespace expertd {
namespace {

using testing::MemorySink;

class GoldenTest : public ::testing::TestWithParam<const char*> {
 protected:
  GoldenTest() : dir_(std::filesystem::path(EXPERTD_TEST_VECTORS) / GetParam() / "checkpoint") {}

  const std::filesystem::path dir_;
};

TEST_P(GoldenTest, OpensPlansAndLoadsForEveryNumberOfRanks) {
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(dir_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_GT(checkpoint->ignored_tensors(), 0);
  const int32_t experts = checkpoint->layers()[0].num_experts;
  for (const int32_t ranks : {1, 2, 4}) {
    const absl::StatusOr<Placement> placement = Placement::Contiguous(experts, ranks);
    ASSERT_TRUE(placement.ok()) << placement.status();
    const LoadPlan plan = MakeLoadPlan(*checkpoint, *placement, 0, ranks);
    EXPECT_EQ(plan.reads.size(), checkpoint->layers().size() * experts * kNumMatrices);
    MemorySink sink(checkpoint->layers(), *placement, 0, ranks);
    const absl::Status status = LoadWeights(*checkpoint, plan, sink);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(sink.finished());
    EXPECT_EQ(sink.num_matrices(), plan.reads.size());
  }
}

INSTANTIATE_TEST_SUITE_P(Served, GoldenTest,
                         ::testing::Values("v4-mxfp4", "v4-nvfp4", "v4-nvfp4-pow2", "qwen3-nvfp4"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace expertd
