#include "server/lifecycle.h"

#include <unistd.h>

#include <csignal>
#include <future>

#include "absl/time/clock.h"
#include "config/exit_codes.h"
#include "gtest/gtest.h"

namespace expertd {
namespace {

class LifecycleTest : public ::testing::Test {
 protected:
  LifecycleTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(LifecycleTest, TheFirstSignalRunsTheCallback) {
  for (const int signal : {SIGTERM, SIGINT}) {
    std::promise<void> terminated;
    SignalWatcher watcher;
    watcher.OnTerminate([&] { terminated.set_value(); });
    kill(getpid(), signal);
    EXPECT_EQ(terminated.get_future().wait_for(std::chrono::seconds(20)),
              std::future_status::ready);
  }
}

TEST_F(LifecycleTest, ASignalThatCameBeforeTheCallbackIsNotLost) {
  std::promise<void> terminated;
  SignalWatcher watcher;
  kill(getpid(), SIGTERM);
  absl::SleepFor(absl::Milliseconds(100));  // either order is right; mostly the signal is first
  watcher.OnTerminate([&] { terminated.set_value(); });
  EXPECT_EQ(terminated.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

TEST_F(LifecycleTest, ABrokenPipeDoesNotEndTheProcess) {
  SignalWatcher watcher;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[0]);
  EXPECT_EQ(write(ends[1], "x", 1), -1);
  close(ends[1]);
}

TEST_F(LifecycleTest, TheSignalsDoAfterwardsWhatTheyDidBefore) {
  const auto before = signal(SIGINT, SIG_IGN);
  { SignalWatcher watcher; }
  EXPECT_EQ(signal(SIGINT, before), SIG_IGN);
}

TEST_F(LifecycleTest, TheSecondSignalEndsTheProcessByThatSignal) {
  EXPECT_EXIT(
      {
        SignalWatcher watcher;
        kill(getpid(), SIGTERM);
        absl::SleepFor(absl::Milliseconds(100));
        kill(getpid(), SIGTERM);
        absl::SleepFor(absl::Seconds(20));
        _exit(0);
      },
      ::testing::KilledBySignal(SIGTERM), "");
}

TEST_F(LifecycleTest, AWatchdogEndsTheProcessAtItsDeadline) {
  EXPECT_EXIT(
      {
        Watchdog watchdog("shutdown", absl::Now() + absl::Milliseconds(50));
        absl::SleepFor(absl::Seconds(20));
      },
      ::testing::ExitedWithCode(exit_codes::kSoftware), "");
}

TEST_F(LifecycleTest, ADestroyedWatchdogDoesNothing) {
  const absl::Time start = absl::Now();
  { Watchdog watchdog("shutdown", absl::Now() + absl::Seconds(60)); }
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

}  // namespace
}  // namespace expertd
