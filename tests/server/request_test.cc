#include "server/request.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/test_call.h"

namespace expertd {
namespace {

TEST(Call, GoesThroughItsStatesInOrder) {
  TestCall call(NumbersRequest(0, 1, 1));
  EXPECT_EQ(call.call()->state(), CallState::kQueued);
  EXPECT_TRUE(call.call()->Stage());
  EXPECT_EQ(call.call()->state(), CallState::kStaged);
  call.call()->Launch();
  EXPECT_EQ(call.call()->state(), CallState::kLaunched);
  call.call()->Finish(Answer{});
  EXPECT_EQ(call.call()->state(), CallState::kAnswered);
}

TEST(Call, IsAnsweredOnce) {
  TestCall call(NumbersRequest(0, 1, 1));
  EXPECT_TRUE(call.call()->AnswerIfQueued(absl::CancelledError("gone")));
  EXPECT_FALSE(call.call()->AnswerIfQueued(absl::CancelledError("again")));
  EXPECT_FALSE(call.call()->Stage());
  call.call()->Finish(Answer{});
  EXPECT_EQ(call.answers(), 1);
  EXPECT_EQ(call.Wait(), absl::CancelledError("gone"));
}

TEST(Call, OnlyAQueuedOneCanBeAnsweredFromOutside) {
  TestCall call(NumbersRequest(0, 1, 1));
  ASSERT_TRUE(call.call()->Stage());
  EXPECT_FALSE(call.call()->AnswerIfQueued(absl::CancelledError("gone")));
  EXPECT_FALSE(call.done());
}

TEST(Call, OfCancelAndStageExactlyOneWins) {
  for (int i = 0; i < 200; ++i) {
    TestCall call(NumbersRequest(0, 1, 1));
    std::atomic<int> winners{0};
    std::thread canceller(
        [&] { winners += call.call()->AnswerIfQueued(absl::CancelledError("")); });
    winners += call.call()->Stage();
    canceller.join();
    EXPECT_EQ(winners, 1);
  }
}

TEST(RequestView, BytesOfAnyAlignmentAreCopied) {
  const std::vector<float> hidden = {1, 2, 3, 4};
  const std::vector<int32_t> ids = {5, -1};
  const std::vector<float> weights = {0.5f, 0.25f};
  std::vector<char> message(1 + 16 + 8 + 8);
  std::memcpy(message.data() + 1, hidden.data(), 16);
  std::memcpy(message.data() + 17, ids.data(), 8);
  std::memcpy(message.data() + 25, weights.data(), 8);
  RequestView view;
  view.key.input_dtype = DType::kF32;
  view.num_tokens = 2;
  view.top_k = 1;
  view.hidden_size = 2;
  view.hidden_bytes = message.data() + 1;
  view.expert_ids = message.data() + 17;
  view.routing_weights = message.data() + 25;

  std::vector<float> row(2);
  view.CopyHidden(1, 1, row.data());
  EXPECT_EQ(row, (std::vector<float>{3, 4}));
  std::vector<int32_t> step_ids(6, 99);
  std::vector<float> step_weights(6, 99);
  view.CopyRoutes(0, 2, 3, step_ids.data(), step_weights.data());
  EXPECT_EQ(step_ids, (std::vector<int32_t>{5, -1, -1, -1, -1, -1}));
  EXPECT_EQ(step_weights, (std::vector<float>{0.5f, 0, 0, 0.25f, 0, 0}));
}

TEST(ByteBudget, NeverGivesMoreThanItsLimit) {
  ByteBudget budget(100);
  EXPECT_TRUE(budget.TryTake(60));
  EXPECT_FALSE(budget.TryTake(41));
  EXPECT_TRUE(budget.TryTake(40));
  EXPECT_FALSE(budget.TryTake(1));
  budget.Return(60);
  EXPECT_TRUE(budget.TryTake(1));
  EXPECT_EQ(budget.used(), 41);
}

}  // namespace
}  // namespace expertd
