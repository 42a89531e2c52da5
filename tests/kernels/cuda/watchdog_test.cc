#include "kernels/cuda/nccl_comm/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <memory>

#include "absl/time/clock.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

using ::testing::HasSubstr;

TEST(Watchdog, WhatEndsInTimeGivesItsOwnStatus) {
  const auto step = std::make_shared<StepName>();
  EXPECT_TRUE(RunWithin(absl::Seconds(10), "rank 0", step, [] { return absl::OkStatus(); }).ok());
  const absl::Status status =
      RunWithin(absl::Seconds(10), "rank 0", step, [] { return absl::DataLossError("lost"); });
  EXPECT_EQ(status, absl::DataLossError("lost"));
  EXPECT_FALSE(IsFatal(status));
}

TEST(Watchdog, WhatDoesNotEndIsGivenUpAndNamed) {
  const auto step = std::make_shared<StepName>();
  // The thread owns what it touches. (A future is released inside the standard library, where
  // ThreadSanitizer does not see what orders that.)
  const auto released = std::make_shared<std::latch>(1);
  const auto ended = std::make_shared<std::latch>(1);
  auto work = [step, released, ended] {
    step->Set("window");
    released->wait();
    ended->count_down();
    return absl::OkStatus();
  };
  const absl::Time begin = absl::Now();
  const absl::Status status = RunWithin(absl::Milliseconds(50), "rank 1 of 2", step, work);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(IsFatal(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 1 of 2: window: a call did not return within 50ms"));
  released->count_down();
  ended->wait();
}

TEST(Watchdog, WhatTheWorkOwnsIsReleasedBeforeItCountsAsEnded) {
  const auto step = std::make_shared<StepName>();
  auto owned = std::make_shared<int>(1);
  std::weak_ptr<int> watched = owned;
  const absl::Status status =
      RunWithin(absl::Seconds(10), "rank 0", step, [owned = std::move(owned)] {
        return *owned == 1 ? absl::OkStatus() : absl::InternalError("");
      });
  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace expertd::cuda
