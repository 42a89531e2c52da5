#include "server/rank_group.h"

#include "gtest/gtest.h"

namespace expertd {
namespace {

using internal::v1::Done;
using internal::v1::Fault;
using internal::v1::Pending;
using internal::v1::Step;

const absl::Time kNow = absl::FromUnixSeconds(1000);

void Add(Pending& pending, const BatchKey& key, int64_t rows, absl::Duration age) {
  auto* batch = pending.add_batches();
  *batch->mutable_key() = ToProto(key);
  batch->set_rows(rows);
  batch->set_oldest_age_us(absl::ToInt64Microseconds(age));
}

Pending One(int32_t layer, int64_t rows, absl::Duration age) {
  Pending pending;
  Add(pending, {layer}, rows, age);
  return pending;
}

Done DoneOf(const Step& step) {
  Done done;
  done.set_generation(step.generation());
  done.set_step(step.step());
  return done;
}

Fault FaultOf(const Step& step) {
  Fault fault;
  fault.set_generation(step.generation());
  fault.set_step(step.step());
  fault.set_reason("rank 1 did not answer");
  return fault;
}

LocalRankGroup::Options NoWait() {
  LocalRankGroup::Options options;
  options.first_generation = 7;
  return options;
}

TEST(RankGroup, NothingPendingMeansNoStep) {
  LocalRankGroup group(NoWait());
  EXPECT_FALSE(group.TakeStep(kNow).has_value());
  EXPECT_EQ(group.NextChange(), absl::InfiniteFuture());
}

TEST(RankGroup, TheLayerWithTheOldestRequestRunsFirst) {
  LocalRankGroup group(NoWait());
  Pending pending;
  Add(pending, {1}, 5, absl::Microseconds(10));
  Add(pending, {2}, 1, absl::Microseconds(30));
  Add(pending, {3}, 9, absl::Microseconds(20));
  group.Report(pending, kNow);
  EXPECT_EQ(group.TakeStep(kNow)->key().layer(), 2);
  EXPECT_EQ(group.TakeStep(kNow)->key().layer(), 3);
}

TEST(RankGroup, StepsAreNumberedWithoutGapsWithinAGeneration) {
  LocalRankGroup group(NoWait());
  for (uint64_t i = 0; i < 5; ++i) {
    group.Report(One(0, 1, absl::ZeroDuration()), kNow);
    const auto step = group.TakeStep(kNow);
    ASSERT_TRUE(step.has_value());
    EXPECT_EQ(step->generation(), 7u);
    EXPECT_EQ(step->step(), i);
    group.Report(DoneOf(*step));
  }
}

TEST(RankGroup, AtMostTwoStepsAreOutstanding) {
  LocalRankGroup group(NoWait());
  Pending pending;
  for (int32_t layer = 0; layer < 3; ++layer)
    Add(pending, {layer}, 1, absl::Microseconds(9 - layer));
  group.Report(pending, kNow);
  const auto first = group.TakeStep(kNow);
  ASSERT_TRUE(group.TakeStep(kNow).has_value());
  EXPECT_FALSE(group.TakeStep(kNow).has_value());
  EXPECT_EQ(group.NextChange(), absl::InfiniteFuture());
  group.Report(DoneOf(*first));
  EXPECT_EQ(group.TakeStep(kNow)->key().layer(), 2);
}

TEST(RankGroup, DifferentDtypesOfALayerAreDifferentSteps) {
  LocalRankGroup group(NoWait());
  Pending pending;
  const BatchKey f32{4, DType::kF32, DType::kBf16};
  Add(pending, f32, 1, absl::Microseconds(2));
  Add(pending, {4}, 1, absl::Microseconds(1));
  group.Report(pending, kNow);
  EXPECT_EQ(FromProto(group.TakeStep(kNow)->key()), f32);
  EXPECT_EQ(FromProto(group.TakeStep(kNow)->key()), BatchKey{4});
}

TEST(RankGroup, ABatchWaitsUntilItsTimeOrItsRowsAreFull) {
  LocalRankGroup::Options options = NoWait();
  options.batch_wait = absl::Microseconds(100);
  options.target_rows = 8;
  LocalRankGroup group(options);
  group.Report(One(0, 7, absl::Microseconds(40)), kNow);
  EXPECT_FALSE(group.TakeStep(kNow).has_value());
  EXPECT_EQ(group.NextChange(), kNow + absl::Microseconds(60));
  EXPECT_TRUE(group.TakeStep(kNow + absl::Microseconds(60)).has_value());

  group.Report(One(0, 8, absl::ZeroDuration()), kNow);
  EXPECT_TRUE(group.TakeStep(kNow).has_value());
}

TEST(RankGroup, ABatchDoesNotWaitOnceEveryOpenStreamHasARequest) {
  LocalRankGroup::Options options = NoWait();
  options.batch_wait = absl::Microseconds(100);
  options.target_rows = 8;
  LocalRankGroup group(options);
  Pending pending = One(0, 2, absl::ZeroDuration());
  group.Report(pending, kNow);
  EXPECT_FALSE(group.TakeStep(kNow).has_value()) << "no streams: the rule says nothing";
  pending.set_open_streams(3);
  pending.set_waiting_streams(2);
  group.Report(pending, kNow);
  EXPECT_FALSE(group.TakeStep(kNow).has_value());
  pending.set_waiting_streams(3);
  group.Report(pending, kNow);
  EXPECT_TRUE(group.TakeStep(kNow).has_value());
}

TEST(RankGroup, AReportReplacesTheOneBefore) {
  LocalRankGroup group(NoWait());
  group.Report(One(0, 1, absl::ZeroDuration()), kNow);
  group.Report(One(1, 1, absl::ZeroDuration()), kNow);
  EXPECT_EQ(group.TakeStep(kNow)->key().layer(), 1);
  EXPECT_FALSE(group.TakeStep(kNow).has_value());
}

TEST(RankGroup, AFaultClosesTheGenerationAndFormOpensTheNextAtStepZero) {
  LocalRankGroup group(NoWait());
  group.Report(One(0, 1, absl::ZeroDuration()), kNow);
  const auto first = group.TakeStep(kNow);
  group.Report(One(1, 1, absl::ZeroDuration()), kNow);
  const auto second = group.TakeStep(kNow);
  group.Report(FaultOf(*first));
  ASSERT_TRUE(group.closed().has_value());
  EXPECT_EQ(group.closed()->generation(), 7u);
  EXPECT_EQ(group.closed()->reason(), "rank 1 did not answer");
  group.Report(DoneOf(*second));  // what ran beside the fault may end well
  group.Report(One(2, 1, absl::ZeroDuration()), kNow);
  EXPECT_FALSE(group.TakeStep(kNow).has_value());

  group.Form();
  EXPECT_FALSE(group.closed().has_value());
  EXPECT_EQ(group.generation(), 8u);
  group.Report(One(2, 1, absl::ZeroDuration()), kNow);
  EXPECT_EQ(group.TakeStep(kNow)->step(), 0u);
}

TEST(RankGroup, AFaultOfAnEarlierGenerationIsIgnored) {
  LocalRankGroup group(NoWait());
  group.Report(One(0, 1, absl::ZeroDuration()), kNow);
  const auto step = group.TakeStep(kNow);
  group.Report(FaultOf(*step));
  group.Form();
  group.Report(FaultOf(*step));
  EXPECT_FALSE(group.closed().has_value());
}

TEST(RankGroup, ALaterStartGivesALaterGeneration) {
  const uint64_t first = LocalRankGroup::FirstGeneration(kNow);
  EXPECT_GT(LocalRankGroup::FirstGeneration(kNow + absl::Seconds(1)), first + 65535);
}

}  // namespace
}  // namespace expertd
