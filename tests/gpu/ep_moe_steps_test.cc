#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "kernels/reference/reference.h"
#include "tests/gpu/testing/ep_fixture.h"
#include "tests/gpu/testing/fused_layer.h"
#include "tests/gpu/testing/moe_cases.h"

// Thousands of steps of random sizes back to back: a row that is read before it is written, from
// the wrong buffer or from another step shows up as a mismatch in bits.
namespace expertd {
namespace {

using testing::HostBatch;
using testing::HostLayer;
using testing::RankBatches;
using testing::RankOutputs;

constexpr int kSteps = 10'000;
constexpr int kStepsAtOnce = 100;
constexpr int32_t kMaxTokens = 64;
constexpr int32_t kPoolRows = 512;
constexpr int32_t kTopK = 6;
constexpr int64_t kHidden = 512;

// Rows with the bits that they have to give; which rows a step takes is random.
struct Pool {
  HostBatch batch;
  std::vector<uint8_t> answers;  // [kPoolRows, H] BF16
};

class EpMoeStepsTest : public testing::EpTest {
 protected:
  EpMoeStepsTest()
      : host_(testing::MakeRandomLayer(
            {.hidden_size = kHidden, .intermediate_size = 256, .num_experts = 16, .top_k = kTopK},
            71)) {}

  // Computed by the ranks themselves, a step at a time from NaN, and right.
  Pool MakePool(testing::RankGroup& group) {
    Pool pool = {
        testing::MakeRandomBatch(host_.spec, kPoolRows, kTopK, testing::Routing::kMasked, 72), {}};
    for (int32_t t = 0; t < kPoolRows; ++t) pool.batch.row_in_request[t] = t * 7 % 13;
    for (int32_t begin = 0; begin < kPoolRows; begin += kMaxTokens) {
      std::vector<int32_t> rows(kMaxTokens);
      for (int32_t i = 0; i < kMaxTokens; ++i) rows[i] = begin + i;
      RankBatches step(num_ranks(), testing::SelectRows(pool.batch, kHidden, {}));
      step[begin / kMaxTokens % num_ranks()] = testing::SelectRows(pool.batch, kHidden, rows);
      const std::vector<uint8_t> part = testing::Joined(group.Run(step));
      pool.answers.insert(pool.answers.end(), part.begin(), part.end());
    }
    testing::FusedLayer one(host_, kPoolRows, kTopK);
    const std::vector<float> expected = one.RunPlain(pool.batch);
    EXPECT_LT(reference::RelL2(testing::AsFloats(pool.answers, DType::kBf16),
                               std::vector<double>(expected.begin(), expected.end())),
              5e-3);
    return pool;
  }

  static int32_t RandomTokens(std::mt19937& random) {
    switch (random() % 8) {
      case 0:
      case 1:
        return 0;
      case 2:
        return kMaxTokens;
      case 3:
        return 1;
      default:
        return static_cast<int32_t>(random() % 24);
    }
  }

  const HostLayer host_;
};

INSTANTIATE_TEST_SUITE_P(Ranks, EpMoeStepsTest, ::testing::ValuesIn(testing::kEpSites),
                         testing::EpSiteName);

TEST_P(EpMoeStepsTest, TenThousandRandomStepsGiveTheRightBitsOfEveryRow) {
  const auto group = testing::MakeGroup(
      GetParam(), host_, testing::PlacementFor(16, num_ranks(), 8), {kMaxTokens, kTopK});
  ASSERT_NE(group, nullptr);
  const Pool pool = MakePool(*group);
  if (HasFailure()) return;
  const int64_t row_bytes = 2 * kHidden;
  std::mt19937 random(73);
  for (int done = 0; done < kSteps; done += kStepsAtOnce) {
    std::vector<std::vector<std::vector<int32_t>>> rows(kStepsAtOnce);  // [step][rank]
    std::vector<RankBatches> steps(kStepsAtOnce);
    for (int i = 0; i < kStepsAtOnce; ++i) {
      const bool empty = random() % 50 == 0;
      for (int rank = 0; rank < num_ranks(); ++rank) {
        std::vector<int32_t> mine(empty ? 0 : RandomTokens(random));
        for (int32_t& row : mine) row = static_cast<int32_t>(random() % kPoolRows);
        steps[i].push_back(testing::SelectRows(pool.batch, kHidden, mine));
        rows[i].push_back(std::move(mine));
      }
    }
    const std::vector<RankOutputs> outputs = group->RunSteps(steps);
    if (HasFailure()) return;
    for (int i = 0; i < kStepsAtOnce; ++i) {
      for (int rank = 0; rank < num_ranks(); ++rank) {
        for (size_t t = 0; t < rows[i][rank].size(); ++t) {
          const auto row = outputs[i][rank].begin() + t * row_bytes;
          ASSERT_TRUE(
              std::equal(row, row + row_bytes, pool.answers.begin() + rows[i][rank][t] * row_bytes))
              << "step " << done + i << ", rank " << rank << ", row " << t << " of "
              << rows[i][rank].size();
        }
      }
    }
  }
}

}  // namespace
}  // namespace expertd
