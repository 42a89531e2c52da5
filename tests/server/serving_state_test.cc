#include "server/serving_state.h"

#include <gmock/gmock.h>

#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/pushback.h"

namespace expertd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ServingStateTest : public ::testing::Test {
 protected:
  std::vector<bool> told_;
  ServingState state_{[this](bool serving) { told_.push_back(serving); }};
};

TEST_F(ServingStateTest, WhileLoadingItSaysHowFar) {
  state_.SetProgress(41, 100);
  const absl::Status ready = state_.Ready();
  EXPECT_EQ(ready.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(ready.message()), HasSubstr("loading: 41 % of 100"));
  EXPECT_EQ(state_.progress().bytes_done(), 41u);
  EXPECT_EQ(state_.WaitUntilLoaded(absl::Now()).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ServingStateTest, AFaultIsLeftByTheNextGeneration) {
  state_.Serve();
  EXPECT_TRUE(state_.Ready().ok());
  state_.Fail(absl::InternalError("rank 1"), false);
  EXPECT_EQ(state_.state(), v1::STATE_FAILED);
  EXPECT_EQ(state_.Ready().code(), absl::StatusCode::kUnavailable);
  EXPECT_GT(PushbackMs(state_.Ready()), 0);
  state_.Serve();
  EXPECT_TRUE(state_.Ready().ok());
  EXPECT_THAT(told_, ElementsAre(true, false, true));
}

TEST_F(ServingStateTest, AFinalFailureStaysAndEndsTheWait) {
  state_.Fail(absl::InternalError("gone"), true);
  state_.Serve();
  EXPECT_EQ(state_.state(), v1::STATE_FAILED);
  EXPECT_EQ(state_.WaitUntilOver(), absl::InternalError("gone"));
  EXPECT_EQ(state_.WaitUntilLoaded(absl::Now()), absl::InternalError("gone"));
}

TEST_F(ServingStateTest, DrainingServesUntilItRefusesAndIsNotLeft) {
  state_.Serve();
  state_.Drain();
  EXPECT_TRUE(state_.Ready().ok());
  EXPECT_TRUE(state_.WaitUntilOver().ok());
  state_.Refuse();
  EXPECT_THAT(std::string(state_.Ready().message()), HasSubstr("draining"));
  state_.Serve();
  state_.Fail(absl::InternalError("late"), true);
  EXPECT_EQ(state_.state(), v1::STATE_DRAINING);
  EXPECT_TRUE(state_.WaitUntilOver().ok());
  EXPECT_THAT(told_, ElementsAre(true, false));
}

}  // namespace
}  // namespace expertd
