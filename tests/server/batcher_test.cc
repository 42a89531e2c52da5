#include "server/batcher.h"

#include <gmock/gmock.h>

#include "gtest/gtest.h"
#include "server/pushback.h"
#include "tests/testing/test_call.h"

namespace expertd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

const absl::Time kNow = absl::FromUnixSeconds(1000);
const BatchKey kLayer0{0, DType::kF32, DType::kF32};
const BatchKey kLayer1{1, DType::kF32, DType::kF32};

Batcher::Options Roomy() { return {100, 1 << 20}; }

TEST(Batcher, WholeRequestsAreTakenInOrderUntilTheRowsAreFull) {
  Batcher batcher(Roomy());
  TestCall a(NumbersRequest(0, 3, 1)), b(NumbersRequest(0, 4, 1)), c(NumbersRequest(0, 1, 1));
  for (TestCall* call : {&a, &b, &c}) ASSERT_TRUE(batcher.Add(call->call(), kNow).ok());
  // b does not fit beside a; c would, and waits its turn all the same.
  EXPECT_THAT(batcher.Take(kLayer0, 6), ElementsAre(a.call()));
  EXPECT_THAT(batcher.Take(kLayer0, 6), ElementsAre(b.call(), c.call()));
  EXPECT_EQ(batcher.num_queued(), 0);
  EXPECT_EQ(a.call()->state(), CallState::kStaged);
}

TEST(Batcher, EachKeyHasItsOwnQueue) {
  Batcher batcher(Roomy());
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(1, 2, 1)), c(NumbersRequest(1, 3, 1));
  v1::ForwardRequest bf16 = NumbersRequest(0, 1, 1);
  bf16.set_hidden_dtype(v1::DTYPE_BF16);
  TestCall d(bf16);
  ASSERT_TRUE(batcher.Add(a.call(), kNow).ok());
  ASSERT_TRUE(batcher.Add(b.call(), kNow + absl::Seconds(1)).ok());
  ASSERT_TRUE(batcher.Add(c.call(), kNow + absl::Seconds(2)).ok());
  ASSERT_TRUE(batcher.Add(d.call(), kNow + absl::Seconds(3)).ok());
  const std::vector<QueuedBatch> queued = batcher.Queued();
  ASSERT_THAT(queued, SizeIs(3));
  EXPECT_EQ(queued[2].key, kLayer1);
  EXPECT_EQ(queued[2].rows, 5);
  EXPECT_EQ(queued[2].oldest, kNow + absl::Seconds(1));
  EXPECT_THAT(batcher.Take(kLayer0, 16), ElementsAre(a.call()));
}

TEST(Batcher, AFullQueueIsRefusedWithAPushback) {
  Batcher batcher({2, 1 << 20});
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(1, 1, 1)), c(NumbersRequest(2, 1, 1));
  ASSERT_TRUE(batcher.Add(a.call(), kNow).ok());
  ASSERT_TRUE(batcher.Add(b.call(), kNow).ok());
  const absl::Status full = batcher.Add(c.call(), kNow);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("the limit is 2"));
  EXPECT_GT(PushbackMs(full), 0);
  batcher.Take(kLayer0, 16);
  EXPECT_TRUE(batcher.Add(c.call(), kNow).ok());
}

TEST(Batcher, BytesAreHeldUntilTheCallIsGone) {
  auto a = std::make_unique<TestCall>(NumbersRequest(0, 4, 1));
  const int64_t bytes = a->call()->view.held_bytes;
  Batcher batcher({100, bytes + 1});
  TestCall b(NumbersRequest(0, 4, 1));
  ASSERT_TRUE(batcher.Add(a->call(), kNow).ok());
  EXPECT_EQ(batcher.inflight_bytes(), bytes);
  const absl::Status full = batcher.Add(b.call(), kNow);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GT(PushbackMs(full), 0);
  batcher.Take(kLayer0, 16);
  EXPECT_EQ(batcher.inflight_bytes(), bytes) << "taken, not yet sent";
  a.reset();
  EXPECT_EQ(batcher.inflight_bytes(), 0);
  EXPECT_TRUE(batcher.Add(b.call(), kNow).ok());
}

TEST(Batcher, RemovingACallFreesItsPlace) {
  Batcher batcher({1, 1 << 20});
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(0, 1, 1));
  ASSERT_TRUE(batcher.Add(a.call(), kNow).ok());
  EXPECT_TRUE(batcher.Remove(*a.call()));
  EXPECT_FALSE(batcher.Remove(*a.call()));
  EXPECT_TRUE(batcher.Queued().empty());
  EXPECT_TRUE(batcher.Add(b.call(), kNow).ok());
}

TEST(Batcher, AnAnsweredCallIsSkipped) {
  Batcher batcher(Roomy());
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(0, 1, 1));
  ASSERT_TRUE(batcher.Add(a.call(), kNow).ok());
  ASSERT_TRUE(batcher.Add(b.call(), kNow).ok());
  EXPECT_TRUE(a.call()->AnswerIfQueued(absl::CancelledError("gone")));
  EXPECT_THAT(batcher.Take(kLayer0, 16), ElementsAre(b.call()));
}

TEST(Batcher, ExpiredCallsLeaveEarliestFirst) {
  Batcher batcher(Roomy());
  TestCall a(NumbersRequest(0, 1, 1), kNow + absl::Seconds(3));
  TestCall b(NumbersRequest(1, 1, 1), kNow + absl::Seconds(1));
  TestCall c(NumbersRequest(0, 1, 1));
  for (TestCall* call : {&a, &b, &c}) ASSERT_TRUE(batcher.Add(call->call(), kNow).ok());
  EXPECT_EQ(batcher.NextDeadline(), kNow + absl::Seconds(1));
  EXPECT_TRUE(batcher.TakeExpired(kNow).empty());
  EXPECT_THAT(batcher.TakeExpired(kNow + absl::Seconds(1)), ElementsAre(b.call()));
  EXPECT_EQ(batcher.NextDeadline(), kNow + absl::Seconds(3));
  EXPECT_THAT(batcher.TakeExpired(kNow + absl::Seconds(9)), ElementsAre(a.call()));
  EXPECT_EQ(batcher.NextDeadline(), absl::InfiniteFuture());
  EXPECT_EQ(batcher.num_queued(), 1);
}

TEST(Batcher, AStreamWaitsWhileItHasACallInTheQueue) {
  Batcher batcher(Roomy());
  const int first = 0, second = 0;  // their addresses stand for streams
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(1, 1, 1)), c(NumbersRequest(1, 1, 1));
  TestCall unary(NumbersRequest(0, 1, 1));
  a.call()->stream = b.call()->stream = &first;
  c.call()->stream = &second;
  for (TestCall* call : {&a, &b, &c, &unary}) ASSERT_TRUE(batcher.Add(call->call(), kNow).ok());
  EXPECT_EQ(batcher.num_waiting_streams(), 2);
  batcher.Take(kLayer0, 16);
  EXPECT_EQ(batcher.num_waiting_streams(), 2);
  EXPECT_TRUE(batcher.Remove(*b.call()));
  EXPECT_EQ(batcher.num_waiting_streams(), 1);
  batcher.TakeAll();
  EXPECT_EQ(batcher.num_waiting_streams(), 0);
}

TEST(Batcher, AClosedOneRefusesWithTheReasonUntilItOpens) {
  Batcher batcher(Roomy());
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(0, 1, 1));
  ASSERT_TRUE(batcher.Add(a.call(), kNow).ok());
  batcher.Close(absl::UnavailableError("draining"));
  EXPECT_EQ(batcher.Add(b.call(), kNow), absl::UnavailableError("draining"));
  EXPECT_THAT(batcher.TakeAll(), ElementsAre(a.call()));
  batcher.Open();
  EXPECT_TRUE(batcher.Add(b.call(), kNow).ok());
}

TEST(Batcher, ManyThreadsAddAndRemoveAtOnce) {
  Batcher batcher(Roomy());
  std::vector<std::thread> threads;
  for (int32_t layer = 0; layer < 4; ++layer) {
    threads.emplace_back([&batcher, layer] {
      for (int i = 0; i < 200; ++i) {
        TestCall call(NumbersRequest(layer, 1, 1), kNow + absl::Seconds(i));
        ASSERT_TRUE(batcher.Add(call.call(), kNow).ok());
        if (i % 2 == 0) {
          EXPECT_TRUE(batcher.Remove(*call.call()));
        } else {
          EXPECT_THAT(batcher.Take(call.call()->view.key, 1), ElementsAre(call.call()));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(batcher.num_queued(), 0);
  EXPECT_EQ(batcher.inflight_bytes(), 0);
}

}  // namespace
}  // namespace expertd
