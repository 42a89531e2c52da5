#include "server/step_filler.h"

#include <gmock/gmock.h>

#include "gtest/gtest.h"
#include "tests/testing/fake_backend.h"
#include "tests/testing/test_call.h"

namespace expertd {
namespace {

using ::testing::ElementsAre;

constexpr int32_t kTokens = 8;  // a rank

class StepFillerTest : public ::testing::Test {
 protected:
  explicit StepFillerTest(int32_t num_ranks = 3)
      : backend_(std::make_shared<FakeBackendControl>(), num_ranks, kTokens, 32),
        memory_(*backend_.AcquireStep(absl::InfiniteFuture())) {}

  FilledStep Fill(const std::vector<std::shared_ptr<Call>>& calls) {
    return FillStep(calls.empty() ? BatchKey{} : calls.front()->view.key, calls, *memory_, kTokens,
                    copies_);
  }
  std::vector<int32_t> Ids(const FilledStep& filled, int32_t rank) {
    const RankBatch& batch = filled.step.ranks[rank];
    return {batch.ids, batch.ids + batch.num_tokens * filled.step.top_k};
  }
  std::vector<int32_t> RowsInRequest(const FilledStep& filled, int32_t rank) {
    const RankBatch& batch = filled.step.ranks[rank];
    return {batch.row_in_request, batch.row_in_request + batch.num_tokens};
  }

  CopyPool copies_{0};
  FakeBackend backend_;
  StepMemory* memory_;
};

TEST_F(StepFillerTest, RowsAreSpreadEvenlyAndInOrder) {
  TestCall a(NumbersRequest(0, 5, 1)), b(NumbersRequest(0, 2, 1));
  const FilledStep filled = Fill({a.call(), b.call()});
  EXPECT_EQ(filled.rows, 7);
  EXPECT_THAT(RowsInRequest(filled, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(RowsInRequest(filled, 1), ElementsAre(3, 4));
  EXPECT_THAT(RowsInRequest(filled, 2), ElementsAre(0, 1));
}

TEST_F(StepFillerTest, EachCallKnowsWhereItsRowsAre) {
  TestCall a(NumbersRequest(0, 5, 1)), b(NumbersRequest(0, 2, 1));
  const FilledStep filled = Fill({a.call(), b.call()});
  ASSERT_EQ(filled.placed.size(), 2u);
  ASSERT_EQ(filled.placed[0].size(), 2u);
  EXPECT_EQ(filled.placed[0][1].rank, 1);
  EXPECT_EQ(filled.placed[0][1].first_row, 0);
  EXPECT_EQ(filled.placed[0][1].count, 2);
  ASSERT_EQ(filled.placed[1].size(), 1u);
  EXPECT_EQ(filled.placed[1][0].rank, 2);
}

TEST_F(StepFillerTest, ShorterRequestsArePaddedWithMaskedRoutes) {
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(0, 1, 3));
  const FilledStep filled = Fill({a.call(), b.call()});
  EXPECT_EQ(filled.step.top_k, 3);
  EXPECT_THAT(Ids(filled, 0), ElementsAre(0, -1, -1));
  EXPECT_THAT(Ids(filled, 1), ElementsAre(0, 1, 2));
}

TEST_F(StepFillerTest, RanksWithoutRowsHaveZeroTokens) {
  TestCall a(NumbersRequest(0, 1, 2));
  const FilledStep filled = Fill({a.call()});
  EXPECT_EQ(filled.step.ranks[0].num_tokens, 1);
  EXPECT_EQ(filled.step.ranks[1].num_tokens, 0);
  EXPECT_EQ(filled.step.ranks[2].num_tokens, 0);
}

TEST_F(StepFillerTest, AStepWithoutCallsIsEmptyAndValid) {
  const FilledStep filled = Fill({});
  EXPECT_EQ(filled.rows, 0);
  EXPECT_EQ(filled.step.top_k, 1);
  for (const RankBatch& rank : filled.step.ranks) EXPECT_EQ(rank.num_tokens, 0);
}

TEST_F(StepFillerTest, TheLargestBatchFillsEveryRank) {
  TestCall a(NumbersRequest(0, 16, 1)), b(NumbersRequest(0, 8, 1));
  const FilledStep filled = Fill({a.call(), b.call()});
  for (const RankBatch& rank : filled.step.ranks) EXPECT_EQ(rank.num_tokens, kTokens);
}

// Large enough for helpers and for several pieces of a call.
TEST_F(StepFillerTest, HelpersMoveTheSameRows) {
  constexpr int32_t kRows = 512;
  constexpr int32_t kHidden = 1024;
  FakeBackend large(std::make_shared<FakeBackendControl>(), 3, kRows, kHidden);
  StepMemory* memory = *large.AcquireStep(absl::InfiniteFuture());
  std::vector<float> hidden(kRows * kHidden);
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<float>(i);
  std::vector<int32_t> ids(kRows);
  for (int32_t i = 0; i < kRows; ++i) ids[i] = i;
  const std::vector<float> weights(kRows, 1.0f);
  RequestView view;
  view.key = {0, DType::kF32, DType::kF32};
  view.num_tokens = kRows;
  view.top_k = 1;
  view.hidden_size = kHidden;
  view.hidden_values = hidden.data();
  view.expert_ids = ids.data();
  view.routing_weights = weights.data();
  const auto call = std::make_shared<Call>(view, absl::InfiniteFuture(), [](const Answer&) {});
  CopyPool helpers(3);
  const FilledStep filled = FillStep(view.key, {call}, *memory, kRows, helpers);
  int64_t row = 0;
  for (const RankBatch& rank : filled.step.ranks) {
    for (int32_t i = 0; i < rank.num_tokens; ++i, ++row) {
      ASSERT_EQ(rank.ids[i], row);
      ASSERT_EQ(rank.row_in_request[i], row);
      const float* values = static_cast<const float*>(rank.hidden) + int64_t{i} * kHidden;
      ASSERT_EQ(values[0], hidden[row * kHidden]);
      ASSERT_EQ(values[kHidden - 1], hidden[(row + 1) * kHidden - 1]);
    }
  }
  EXPECT_EQ(row, kRows);
}

TEST_F(StepFillerTest, NumbersAreRoundedToTheInputDtype) {
  v1::ForwardRequest request = NumbersRequest(0, 1, 1, 1.001f);
  request.set_hidden_dtype(v1::DTYPE_BF16);
  TestCall call(request);
  const FilledStep filled = Fill({call.call()});
  EXPECT_EQ(filled.step.input_dtype, DType::kBf16);
  EXPECT_EQ(static_cast<const uint16_t*>(filled.step.ranks[0].hidden)[0], FloatToBf16(1.001f));
}

}  // namespace
}  // namespace expertd
