#include "kernels/cpu/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>
#include <vector>

namespace expertd {
namespace {

using ::testing::HasSubstr;

// One rank's side of an all-to-all: message to rank d is `text` + d.
struct Side {
  explicit Side(int32_t num_ranks, size_t capacity = 64)
      : messages(num_ranks),
        buffers(num_ranks, std::vector<uint8_t>(capacity)),
        received(num_ranks) {}

  absl::Status Run(Exchange& exchange, int32_t rank, const ExchangeTag& tag,
                   const std::string& text, absl::Duration timeout = absl::Seconds(20)) {
    std::vector<absl::Span<const uint8_t>> send;
    std::vector<absl::Span<uint8_t>> receive;
    for (size_t peer = 0; peer < messages.size(); ++peer) {
      messages[peer] = text + std::to_string(peer);
      send.emplace_back(reinterpret_cast<const uint8_t*>(messages[peer].data()),
                        messages[peer].size());
      receive.emplace_back(absl::MakeSpan(buffers[peer]));
    }
    return exchange.AllToAll(rank, tag, send, receive, absl::MakeSpan(received),
                             absl::Now() + timeout);
  }
  std::string From(int32_t peer) const {
    return {buffers[peer].begin(), buffers[peer].begin() + received[peer]};
  }

  std::vector<std::string> messages;
  std::vector<std::vector<uint8_t>> buffers;
  std::vector<size_t> received;
};

TEST(Exchange, EveryRankReceivesWhatItsPeersSentIt) {
  constexpr int32_t kRanks = 5;
  const auto exchange = MakeInProcessExchange(kRanks);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Side side(kRanks);
      for (uint64_t step = 0; step < 50; ++step) {
        for (const auto phase : {ExchangePhase::kDispatch, ExchangePhase::kCombine}) {
          const std::string text = std::to_string(step * 100 + rank) + "to";
          ASSERT_TRUE(side.Run(*exchange, rank, {1, step, 0, phase}, text).ok());
          for (int32_t peer = 0; peer < kRanks; ++peer) {
            if (peer == rank) continue;
            EXPECT_EQ(side.From(peer),
                      std::to_string(step * 100 + peer) + "to" + std::to_string(rank));
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Exchange, ADeadlineNamesWhoWaitedForWhomInWhichStep) {
  const auto exchange = MakeInProcessExchange(3);
  Side side(3);
  const absl::Status status =
      side.Run(*exchange, 2, {1, 7, 1, ExchangePhase::kCombine}, "x", absl::Milliseconds(20));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("step 7 round 1 combine: rank 2 waited for the rows of rank 0"));
}

TEST(Exchange, ASenderWhoseRowsNobodyTakesSaysSo) {
  const auto exchange = MakeInProcessExchange(3);
  const ExchangeTag tag{1, 4, 0, ExchangePhase::kDispatch};
  Side one(3), two(3);
  // Rank 2 never comes; rank 1 takes from 0 and waits for 2, rank 0 waits for 2 as well.
  auto other = std::async(std::launch::async,
                          [&] { return one.Run(*exchange, 1, tag, "x", absl::Milliseconds(50)); });
  const absl::Status status = two.Run(*exchange, 0, tag, "y", absl::Milliseconds(50));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 waited for the rows of rank 2"));
  EXPECT_THAT(std::string(other.get().message()),
              HasSubstr("rank 1 waited for the rows of rank 2"));
}

TEST(Exchange, APeerThatHasGoneOnIsReportedAtOnce) {
  const auto exchange = MakeInProcessExchange(2);
  Side ahead(2), behind(2);
  auto other = std::async(std::launch::async, [&] {
    return ahead.Run(*exchange, 0, {1, 9, 0, ExchangePhase::kDispatch}, "x", absl::Seconds(1));
  });
  absl::Status status = absl::OkStatus();
  for (uint64_t step = 1; step < 9 && status.code() != absl::StatusCode::kAborted; ++step) {
    status = behind.Run(*exchange, 1, {1, step, 0, ExchangePhase::kDispatch}, "y",
                        absl::Milliseconds(200));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("gone on to step 9 round 0 dispatch"));
  EXPECT_FALSE(other.get().ok());
}

TEST(Exchange, AMessageThatDoesNotFitIsRefused) {
  const auto exchange = MakeInProcessExchange(2);
  const ExchangeTag tag{1, 0, 0, ExchangePhase::kDispatch};
  Side small(2, 3), large(2);
  auto other = std::async(std::launch::async, [&] {
    return large.Run(*exchange, 1, tag, "seven", absl::Milliseconds(100));
  });
  const absl::Status status = small.Run(*exchange, 0, tag, "x", absl::Seconds(20));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 sent rank 0 6 bytes"));
  EXPECT_FALSE(other.get().ok());
}

TEST(Exchange, AbortEndsWhoWaitsNowAndLater) {
  const auto exchange = MakeInProcessExchange(2);
  Side side(2);
  auto waiting = std::async(std::launch::async, [&] {
    return side.Run(*exchange, 0, {1, 0, 0, ExchangePhase::kDispatch}, "x");
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  exchange->Abort(absl::UnavailableError("over"));
  EXPECT_EQ(waiting.get(), absl::UnavailableError("over"));
  EXPECT_EQ(side.Run(*exchange, 0, {1, 1, 0, ExchangePhase::kDispatch}, "x"),
            absl::UnavailableError("over"));
}

TEST(Exchange, AFailedStepLeavesTheNextOneWhole) {
  const auto exchange = MakeInProcessExchange(2);
  Side zero(2), one(2);
  EXPECT_FALSE(
      zero.Run(*exchange, 0, {1, 0, 0, ExchangePhase::kDispatch}, "a", absl::Milliseconds(10))
          .ok());
  const ExchangeTag next{1, 1, 0, ExchangePhase::kDispatch};
  auto other = std::async(std::launch::async, [&] { return one.Run(*exchange, 1, next, "b"); });
  EXPECT_TRUE(zero.Run(*exchange, 0, next, "c").ok());
  EXPECT_TRUE(other.get().ok());
  EXPECT_EQ(zero.From(1), "b0");
  EXPECT_EQ(one.From(0), "c1");
}

}  // namespace
}  // namespace expertd
