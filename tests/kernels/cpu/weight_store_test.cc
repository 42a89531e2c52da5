#include "kernels/cpu/weight_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>

#include "tests/kernels/cpu/cpu_fixture.h"

namespace expertd::cpu {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<WeightStore> Store(const LayerSpec& spec, int32_t num_ranks = 2) {
  auto store = std::make_unique<WeightStore>(
      std::vector<LayerSpec>{spec},
      std::make_shared<const Placement>(*Placement::Contiguous(3, num_ranks)), 0, num_ranks);
  EXPECT_TRUE(store->Map().ok());
  return store;
}

const LayerSpec kMx = testing::MakeSpec(Recipe::kMxfp4, 64, 32, 3);
const LayerSpec kNv = testing::MakeSpec(Recipe::kNvfp4, 64, 32, 3);

TEST(WeightStore, ReserveGivesTheFinalMemoryInTheFilesLayout) {
  const auto store = Store(kNv);
  const MatrixId id{1, 3, 0, Matrix::kDown};
  const auto buffers = store->Reserve(id, absl::InfiniteFuture());
  ASSERT_TRUE(buffers.ok()) << buffers.status();
  EXPECT_EQ(buffers->codes.size(), 64u * 32 / 2);
  EXPECT_EQ(buffers->scales.size(), 64u * 32 / 16);
  ASSERT_TRUE(store->Commit(id, 0.25f).ok());
  const Fp4Matrix& matrix = store->Get(1, 0, 0, Matrix::kDown);
  EXPECT_EQ(matrix.codes, buffers->codes.data());
  EXPECT_EQ(matrix.scales, buffers->scales.data());
  EXPECT_EQ(matrix.in, 32);
  EXPECT_EQ(matrix.second_level, 0.25f);
}

TEST(WeightStore, FinishListsWhatIsMissing) {
  const auto store = Store(kMx);
  const testing::RandomExperts experts(kMx, 1);
  for (int32_t slot = 0; slot < 2; ++slot) {
    for (const Matrix matrix : {Matrix::kGate, Matrix::kUp, Matrix::kDown}) {
      const MatrixId id{0, 3, slot, matrix};
      ASSERT_TRUE(store->Reserve(id, absl::InfiniteFuture()).ok());
      if (slot == 1 && matrix == Matrix::kUp) continue;  // reserved, never committed
      ASSERT_TRUE(store->Commit(id, 1).ok());
    }
  }
  const absl::Status status = store->Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("4 matrices were not loaded"));
  EXPECT_THAT(message, HasSubstr("rank 0 layer 3 slot 1 up (expert 1)"));
  EXPECT_THAT(message, HasSubstr("rank 1 layer 3 slot 0 down (expert 2)"));
  EXPECT_FALSE(store->finished());  // the empty second slot of rank 1 is nobody's
}

TEST(WeightStore, ALongListIsCutAndCounted) {
  WeightStore store({testing::MakeSpec(Recipe::kMxfp4, 64, 32, 9)},
                    std::make_shared<const Placement>(*Placement::Contiguous(9, 1)), 0, 1);
  const absl::Status status = store.Finish();
  EXPECT_THAT(std::string(status.message()), HasSubstr("27 matrices"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("; ..."));
}

TEST(WeightStore, EachMatrixIsReservedAndCommittedOnce) {
  const auto store = Store(kMx);
  const MatrixId id{0, 3, 0, Matrix::kGate};
  EXPECT_EQ(store->Commit(id, 1).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(store->Reserve(id, absl::InfiniteFuture()).ok());
  EXPECT_FALSE(store->Reserve(id, absl::InfiniteFuture()).ok());
  ASSERT_TRUE(store->Commit(id, 1).ok());
  EXPECT_FALSE(store->Commit(id, 1).ok());
}

TEST(WeightStore, MatricesThatAreNotThereAreRefused) {
  const auto store = Store(kMx);
  for (const MatrixId& id : {MatrixId{2, 3, 0, Matrix::kGate}, MatrixId{0, 4, 0, Matrix::kGate},
                             MatrixId{0, 3, 2, Matrix::kGate}, MatrixId{1, 3, 1, Matrix::kGate}}) {
    EXPECT_EQ(store->Reserve(id, absl::InfiniteFuture()).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(WeightStore, BadSecondLevelScalesAreRefused) {
  const auto store = Store(kNv);
  const MatrixId id{0, 3, 0, Matrix::kGate};
  ASSERT_TRUE(store->Reserve(id, absl::InfiniteFuture()).ok());
  for (const float bad : {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(store->Commit(id, bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_TRUE(store->Commit(id, 1).ok());
}

}  // namespace
}  // namespace expertd::cpu
