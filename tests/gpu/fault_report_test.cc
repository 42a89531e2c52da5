#include "kernels/cuda/fault_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "config/limits.h"
#include "kernels/cuda/device_choice.h"
#include "kernels/cuda/step_limits.h"
#include "kernels/fatal.h"

// Nothing here needs a GPU.
namespace expertd::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

RankResult Ended(int32_t rank) {
  RankResult result;
  result.rank = rank;
  return result;
}

RankResult Fault(int32_t rank, uint32_t code, uint32_t peer) {
  RankResult result = Ended(rank);
  result.fault.code = code;
  result.fault.step = 9;
  result.fault.cta = 3;
  result.fault.tile = 17;
  result.fault.peer = peer;
  result.fault.found = 8;
  result.fault.expected = 9;
  result.fault.waited_us = 500123;
  result.fault.complete = 1;
  return result;
}

RankResult Error(int32_t rank, absl::Status status) {
  RankResult result = Ended(rank);
  result.status = std::move(status);
  return result;
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST(FaultReportTest, NoFailureIsOk) {
  EXPECT_TRUE(DescribeFailure({Ended(0)}).ok());
  EXPECT_TRUE(DescribeFailure({Ended(1), Ended(0)}).ok());
}

TEST(FaultReportTest, APeerThatDidNotAnswerIsUnavailableAndNamed) {
  const absl::Status status =
      DescribeFailure({Ended(1), Fault(0, moe_layer::kWaitTokens, 1), Ended(2)});
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_EQ(status.message(),
            "rank 1 did not answer in 500 ms: on rank 0 an FC1 tile waited for row 17 of rank 1 "
            "(kernel step 9, CTA 3, found 8, expected 9, waited 500123 us)");
}

TEST(FaultReportTest, WhatBeganItComesFirstAndTheConsequencesAfterIt) {
  // Rank 1 sends no rows: rank 0 cannot compute, so its partial rows do not come either.
  const absl::Status status =
      DescribeFailure({Fault(1, moe_layer::kWaitPartials, 0), Fault(0, moe_layer::kWaitTokens, 1),
                       Fault(2, moe_layer::kStopped, 2)});
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(Text(status), StartsWith("rank 1 did not answer in 500 ms: on rank 0 "));
  EXPECT_THAT(Text(status), HasSubstr("; rank 0 did not answer in 500 ms: on rank 1 combine"));
  EXPECT_THAT(Text(status), Not(HasSubstr("told to stop")));
}

TEST(FaultReportTest, AWaitWithinARankIsItsOwnFaultAndComesBeforeWhoWaitedForIt) {
  const absl::Status status =
      DescribeFailure({Fault(0, moe_layer::kWaitPartials, 1), Fault(1, moe_layer::kWaitFc1, 1)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_THAT(Text(status), StartsWith("rank 1 gave the step up: an FC2 tile waited"));
}

TEST(FaultReportTest, ACtaThatDoesNotComeToTheSortIsTheRanksOwnFaultAndNamed) {
  const absl::Status status =
      DescribeFailure({Fault(0, moe_layer::kWaitRoutes, 1), Fault(1, moe_layer::kWaitSort, 1)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_THAT(Text(status), StartsWith("rank 1 gave the step up: the sort of the routes waited for "
                                       "CTA 17 (kernel step 9, CTA 3, "));
  EXPECT_THAT(Text(status), HasSubstr("; rank 1 did not answer in 500 ms: on rank 0 routing"));
}

TEST(FaultReportTest, WhatOfAPeersRoutesDidNotComeIsNamed) {
  RankResult waited = Fault(0, moe_layer::kWaitRoutes, 1);
  EXPECT_THAT(Text(DescribeFailure({waited, Ended(1)})),
              HasSubstr("on rank 0 routing waited for route 16 of the peer ("));
  waited.fault.tile = 0;
  EXPECT_THAT(Text(DescribeFailure({waited, Ended(1)})),
              HasSubstr("on rank 0 routing waited for the peer's number of routes ("));
}

// A rank's own rows are waited for like those of a peer.
TEST(FaultReportTest, AWaitForRowsOfItsOwnTokensIsTheRanksOwnFault) {
  const absl::Status status =
      DescribeFailure({Ended(0), Fault(1, moe_layer::kWaitTokens, 1), Ended(2)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_THAT(Text(status), StartsWith("rank 1 gave the step up: an FC1 tile waited for row 17 of "
                                       "rank 1 (kernel step 9, "));
}

TEST(FaultReportTest, OneRankIsNotNumbered) {
  const absl::Status stopped = DescribeFailure({Fault(0, moe_layer::kStopped, 0)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(stopped));
  EXPECT_THAT(Text(stopped), StartsWith("the GPU gave the step up: it was told to stop"));
  const absl::Status error = absl::InternalError("launch failed");
  EXPECT_EQ(DescribeFailure({Error(0, error)}), error);
}

TEST(FaultReportTest, AnErrorOfTheHostComesBeforeTheFaultsThatFollowAndAFatalOneFirst) {
  const absl::Status launch = absl::InternalError("launch failed");
  const absl::Status sticky = MarkFatal(absl::InternalError("illegal address"));
  const absl::Status failed =
      DescribeFailure({Fault(0, moe_layer::kWaitRoutes, 1), Error(1, launch)});
  EXPECT_TRUE(absl::IsInternal(failed));
  EXPECT_FALSE(IsFatal(failed));
  EXPECT_THAT(Text(failed), StartsWith("rank 1: launch failed; rank 1 did not answer"));
  const absl::Status fatal = DescribeFailure({Error(0, launch), Error(1, sticky)});
  EXPECT_TRUE(IsFatal(fatal));
  EXPECT_THAT(Text(fatal), StartsWith("rank 1: illegal address; rank 0: launch failed"));
  // All alike: said once.
  EXPECT_EQ(Text(DescribeFailure({Error(0, launch), Error(1, launch)})), "rank 0: launch failed");
}

TEST(WaitLimitTest, TheKernelSpeaksBeforeItsStepIsStopped) {
  WaitQuestion question = {1, 100, 7168, 3072, absl::Seconds(30)};
  EXPECT_EQ(WaitLimit(question), absl::Milliseconds(limits::kCudaWaitMs));
  question.step_timeout = absl::Milliseconds(100);
  EXPECT_EQ(WaitLimit(question), absl::Milliseconds(50));
  question.num_ranks = 2;
  EXPECT_EQ(WaitLimit(question), absl::Milliseconds(50));
}

TEST(WaitLimitTest, ALostPeerIsFoundSoonAndASlowOneIsNotTakenForLost) {
  WaitQuestion question = {2, 64 * 6 * 2, 7168, 3072, absl::Seconds(30)};
  EXPECT_GE(WaitLimit(question), absl::Milliseconds(limits::kCudaPeerWaitMs));
  EXPECT_LT(WaitLimit(question), absl::Milliseconds(limits::kCudaPeerWaitMs + 2));
  // 65536 rows of each of two ranks, K 32, all to one: 5.5e14 operations.
  question.routes = int64_t{65536} * 32 * 2;
  EXPECT_GT(WaitLimit(question), absl::Seconds(5));
  question.routes *= 100;
  EXPECT_EQ(WaitLimit(question), absl::Milliseconds(limits::kCudaWaitMs));
}

TEST(DeviceChoiceTest, OneRankADeviceOfThoseThatAreVisible) {
  EXPECT_THAT(*ChooseDevices({}, 0, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(*ChooseDevices({}, 2, 3), ElementsAre(0, 1));
  EXPECT_THAT(*ChooseDevices({2, 0}, 0, 3), ElementsAre(2, 0));
  EXPECT_THAT(*ChooseDevices({2, 0}, 2, 3), ElementsAre(2, 0));
}

TEST(DeviceChoiceTest, WhatDoesNotFitIsNamed) {
  const absl::Status too_many = ChooseDevices({}, 4, 3).status();
  EXPECT_TRUE(absl::IsInvalidArgument(too_many));
  EXPECT_EQ(too_many.message(), "ranks: found 4, expected at most one a visible GPU (3)");
  const absl::Status absent = ChooseDevices({0, 63}, 0, 3).status();
  EXPECT_TRUE(absl::IsInvalidArgument(absent));
  EXPECT_EQ(absent.message(), "device 63 does not exist: 3 visible");
  const absl::Status twice = ChooseDevices({1, 1}, 0, 3).status();
  EXPECT_TRUE(absl::IsInvalidArgument(twice));
  EXPECT_THAT(Text(twice), HasSubstr("device 1 is named twice"));
  const absl::Status other = ChooseDevices({0, 1}, 3, 3).status();
  EXPECT_TRUE(absl::IsInvalidArgument(other));
  EXPECT_EQ(other.message(), "devices: found 2, expected one a rank (3)");
}

}  // namespace
}  // namespace expertd::cuda
