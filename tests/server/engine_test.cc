#include "server/engine.h"

#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/fatal.h"
#include "server/pushback.h"
#include "tests/testing/fake_backend.h"
#include "tests/testing/test_call.h"

namespace expertd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

class EngineTest : public ::testing::Test {
 protected:
  void Start(Engine::Options options) {
    engine_ = std::make_unique<Engine>(options, &metrics_, [this](const absl::Status& status) {
      std::lock_guard lock(mutex_);
      health_.push_back(status);
      health_changed_.notify_all();
    });
    engine_->Start(std::make_unique<FakeBackend>(control_, 2, 8, 32));
  }
  void Start() { Start(Defaults()); }

  static Engine::Options Defaults() {
    Engine::Options options;
    options.queue = {100, 1 << 20};
    options.step_timeout = absl::Seconds(20);
    return options;
  }

  // Two steps that do not end: what comes now stays in the queue.
  void Occupy() {
    control_->Hold();
    for (size_t i = 0; i < 2; ++i) {
      busy_.push_back(std::make_unique<TestCall>(NumbersRequest(3, 1, 1)));
      engine_->Submit(busy_.back()->call());
      ASSERT_TRUE(control_->WaitForSubmitted(i + 1));
    }
  }

  std::vector<absl::Status> Health(size_t count) {
    std::unique_lock lock(mutex_);
    health_changed_.wait_for(lock, std::chrono::seconds(20),
                             [&] { return health_.size() >= count; });
    return health_;
  }

  const std::shared_ptr<FakeBackendControl> control_ = std::make_shared<FakeBackendControl>();
  Metrics metrics_;
  std::mutex mutex_;
  std::condition_variable health_changed_;
  std::vector<absl::Status> health_;  // guarded by mutex_
  std::vector<std::unique_ptr<TestCall>> busy_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineTest, ARequestIsAnswered) {
  Start();
  TestCall call(NumbersRequest(1, 5, 2));
  engine_->Submit(call.call());
  EXPECT_TRUE(call.Wait().ok());
  EXPECT_EQ(call.output(), call.Expected());
  EXPECT_EQ(call.timing().kernel_us, 22);
  EXPECT_GE(call.timing().copy_in_us, 11);
  EXPECT_EQ(call.timing().copy_out_us, 33);
  EXPECT_EQ(call.timing().step, 0u);
  EXPECT_EQ(call.timing().step_tokens, 5);
}

TEST_F(EngineTest, WaitingBehindTheRunningStepIsQueueTime) {
  Start();
  control_->Hold();
  TestCall running(NumbersRequest(1, 1, 1)), staged(NumbersRequest(1, 1, 1));
  engine_->Submit(running.call());
  ASSERT_TRUE(control_->WaitForSubmitted(1));
  engine_->Submit(staged.call());
  ASSERT_TRUE(control_->WaitForSubmitted(2));
  absl::SleepFor(absl::Milliseconds(30));
  control_->Release();
  EXPECT_TRUE(running.Wait().ok());
  EXPECT_TRUE(staged.Wait().ok());
  EXPECT_GE(staged.timing().queue_us, 29'000);
}

TEST_F(EngineTest, ZeroTokensAreAnsweredWithoutAStep) {
  Start();
  TestCall call(NumbersRequest(1, 0, 2));
  engine_->Submit(call.call());
  EXPECT_TRUE(call.done());
  EXPECT_TRUE(call.Wait().ok());
  EXPECT_TRUE(control_->Steps().empty());
}

TEST_F(EngineTest, RequestsThatWaitShareAStepAndKeepTheirAnswers) {
  Start();
  Occupy();
  TestCall a(NumbersRequest(0, 3, 1, 10)), b(NumbersRequest(0, 4, 3, 500)),
      c(NumbersRequest(0, 9, 2, 7));
  for (TestCall* call : {&a, &b, &c}) engine_->Submit(call->call());
  control_->Release();
  for (TestCall* call : {&a, &b, &c}) {
    EXPECT_TRUE(call->Wait().ok());
    EXPECT_EQ(call->output(), call->Expected());
  }
  const std::vector<RecordedStep> steps = control_->Steps();
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[2].rows(), 16);
  EXPECT_EQ(steps[2].top_k, 3);
  EXPECT_THAT(steps[2].row_in_request[0], ElementsAre(0, 1, 2, 0, 1, 2, 3, 0));
  EXPECT_EQ(a.timing().step_tokens, 16);
}

TEST_F(EngineTest, WhatDoesNotFitWaitsForTheNextStep) {
  Start();
  Occupy();
  TestCall a(NumbersRequest(0, 10, 1)), b(NumbersRequest(0, 10, 1));
  engine_->Submit(a.call());
  engine_->Submit(b.call());
  control_->Release();
  EXPECT_TRUE(a.Wait().ok());
  EXPECT_TRUE(b.Wait().ok());
  EXPECT_EQ(b.output(), b.Expected());
  EXPECT_EQ(control_->Steps().size(), 4u);
}

TEST_F(EngineTest, TheOldestRequestsLayerRunsFirst) {
  Start();
  Occupy();
  TestCall a(NumbersRequest(2, 1, 1)), b(NumbersRequest(0, 1, 1)), c(NumbersRequest(1, 1, 1));
  for (TestCall* call : {&a, &b, &c}) {
    engine_->Submit(call->call());
    absl::SleepFor(absl::Milliseconds(2));
  }
  TestCall late(NumbersRequest(2, 1, 1));  // rides with the first
  engine_->Submit(late.call());
  control_->Release();
  for (TestCall* call : {&a, &b, &c, &late}) EXPECT_TRUE(call->Wait().ok());
  std::vector<int32_t> layers;
  for (const RecordedStep& step : control_->Steps()) layers.push_back(step.layer);
  EXPECT_THAT(layers, ElementsAre(3, 3, 2, 0, 1));
}

TEST_F(EngineTest, DtypesArePassedToTheBackendAndNotMixed) {
  Start();
  Occupy();
  v1::ForwardRequest bf16 = NumbersRequest(0, 2, 1);
  bf16.set_hidden_dtype(v1::DTYPE_BF16);
  bf16.set_output_dtype(v1::DTYPE_BF16);
  TestCall a(bf16), b(NumbersRequest(0, 2, 1));
  engine_->Submit(a.call());
  engine_->Submit(b.call());
  control_->Release();
  EXPECT_TRUE(a.Wait().ok());
  EXPECT_TRUE(b.Wait().ok());
  const std::vector<RecordedStep> steps = control_->Steps();
  ASSERT_EQ(steps.size(), 4u);
  EXPECT_EQ(steps[2].input_dtype, DType::kBf16);
  EXPECT_EQ(steps[2].output_dtype, DType::kBf16);
  EXPECT_EQ(steps[3].input_dtype, DType::kF32);
  EXPECT_EQ(b.output(), b.Expected());
}

TEST_F(EngineTest, ADeadlineThatPassesInTheQueueIsAnsweredBeforeAnyCompute) {
  Start();
  Occupy();
  TestCall call(NumbersRequest(0, 1, 1), absl::Now() + absl::Milliseconds(50));
  engine_->Submit(call.call());
  const absl::Status status = call.Wait();  // while both steps still run
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("queue"));
  control_->Release();
  ASSERT_TRUE(engine_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(metrics_.expired_in_queue(), 1u);
  EXPECT_EQ(control_->Steps().size(), 2u);
}

TEST_F(EngineTest, ACancelledRequestLeavesTheQueue) {
  Start();
  Occupy();
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(0, 2, 1));
  engine_->Submit(a.call());
  engine_->Submit(b.call());
  engine_->Cancel(*a.call());
  EXPECT_EQ(a.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(engine_->num_queued(), 1);
  EXPECT_EQ(metrics_.cancelled_in_queue(), 1u);
  control_->Release();
  EXPECT_TRUE(b.Wait().ok());
  EXPECT_EQ(b.output(), b.Expected());
  EXPECT_EQ(control_->Steps().back().rows(), 2);
  EXPECT_EQ(a.answers(), 1);
}

TEST_F(EngineTest, CancellingAfterTheLaunchChangesNothing) {
  Start();
  Occupy();
  engine_->Cancel(*busy_[0]->call());
  EXPECT_FALSE(busy_[0]->done());
  control_->Release();
  EXPECT_TRUE(busy_[0]->Wait().ok());
  EXPECT_EQ(busy_[0]->answers(), 1);
}

TEST_F(EngineTest, AFullQueueIsRefusedAndOthersAreServed) {
  Engine::Options options = Defaults();
  options.queue.max_queued_requests = 2;
  Start(options);
  Occupy();
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(1, 1, 1)), c(NumbersRequest(0, 1, 1));
  for (TestCall* call : {&a, &b, &c}) engine_->Submit(call->call());
  const absl::Status full = c.Wait();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GT(PushbackMs(full), 0);
  control_->Release();
  EXPECT_TRUE(a.Wait().ok());
  EXPECT_TRUE(b.Wait().ok());
}

TEST_F(EngineTest, AFailedStepAnswersUnavailableAndTheNextGenerationServes) {
  Start();
  Occupy();
  TestCall queued(NumbersRequest(0, 1, 1));
  engine_->Submit(queued.call());
  control_->FailNext(absl::InternalError("rank 1 fell over"));
  control_->Release();
  const absl::Status failed = busy_[0]->Wait();
  EXPECT_EQ(failed.code(), kUnavailable);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("step 0 layer 3: rank 1 fell over"));
  EXPECT_TRUE(busy_[0]->output().empty());
  EXPECT_TRUE(busy_[1]->Wait().ok()) << "its own step ended well";
  const absl::Status ended = queued.Wait();
  EXPECT_EQ(ended.code(), kUnavailable);
  EXPECT_THAT(std::string(ended.message()), HasSubstr("generation"));
  EXPECT_GT(PushbackMs(ended), 0);

  const std::vector<absl::Status> health = Health(3);
  ASSERT_EQ(health.size(), 3u);
  EXPECT_TRUE(health[0].ok());
  EXPECT_FALSE(health[1].ok());
  EXPECT_TRUE(health[2].ok());
  TestCall next(NumbersRequest(0, 1, 1));
  engine_->Submit(next.call());
  EXPECT_TRUE(next.Wait().ok());
  const std::vector<RecordedStep> steps = control_->Steps();
  EXPECT_EQ(steps.back().generation, steps.front().generation + 1);
  EXPECT_EQ(steps.back().step, 0u);
}

TEST_F(EngineTest, AFatalFaultIsNotLeftAgain) {
  Start();
  control_->FailNext(MarkFatal(absl::InternalError("the device is gone")));
  TestCall a(NumbersRequest(0, 1, 1));
  engine_->Submit(a.call());
  EXPECT_EQ(a.Wait().code(), kUnavailable);
  ASSERT_EQ(Health(2).size(), 2u);
  EXPECT_TRUE(IsFatal(Health(2)[1]));
  TestCall b(NumbersRequest(0, 1, 1));
  engine_->Submit(b.call());
  EXPECT_EQ(b.Wait().code(), kUnavailable);
  EXPECT_EQ(control_->Steps().size(), 1u);
}

TEST_F(EngineTest, ARefusedSubmitIsAFault) {
  Start();
  control_->RefuseNext(absl::InvalidArgumentError("no such layer"));
  TestCall a(NumbersRequest(0, 1, 1));
  engine_->Submit(a.call());
  const absl::Status status = a.Wait();
  EXPECT_EQ(status.code(), kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no such layer"));
  ASSERT_EQ(Health(3).size(), 3u);
  TestCall b(NumbersRequest(0, 1, 1));
  engine_->Submit(b.call());
  EXPECT_TRUE(b.Wait().ok());
}

TEST_F(EngineTest, AStepThatDoesNotEndIsAnsweredAtItsLimit) {
  Engine::Options options = Defaults();
  options.step_timeout = absl::Milliseconds(100);
  Start(options);
  Occupy();
  const absl::Status status = busy_[0]->Wait();
  EXPECT_EQ(status.code(), kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("did not end within 100ms"));
  EXPECT_EQ(busy_[1]->Wait().code(), kUnavailable);
  EXPECT_TRUE(IsFatal(Health(2)[1]));
}

TEST_F(EngineTest, DrainWaitsForWhatIsQueuedAndRunning) {
  Start();
  Occupy();
  TestCall queued(NumbersRequest(0, 1, 1));
  engine_->Submit(queued.call());
  EXPECT_FALSE(engine_->Drain(absl::Now() + absl::Milliseconds(50)));
  control_->Release();
  EXPECT_TRUE(engine_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_TRUE(queued.done());
}

TEST_F(EngineTest, StopAnswersWhatIsLeft) {
  Start();
  Occupy();
  TestCall queued(NumbersRequest(0, 1, 1));
  engine_->Submit(queued.call());
  engine_->Stop(absl::UnavailableError("the drain deadline passed"));
  EXPECT_EQ(queued.Wait(), absl::UnavailableError("the drain deadline passed"));
  EXPECT_EQ(busy_[0]->Wait().code(), kUnavailable);
  EXPECT_EQ(busy_[1]->Wait().code(), kUnavailable);
  TestCall late(NumbersRequest(0, 1, 1));
  engine_->Submit(late.call());
  EXPECT_EQ(late.Wait().code(), kUnavailable);
  EXPECT_EQ(control_->memories_out, 0);
}

TEST_F(EngineTest, BeforeStartRequestsAreRefused) {
  Engine engine(Defaults(), &metrics_, [](const absl::Status&) {});
  TestCall call(NumbersRequest(0, 1, 1));
  engine.Submit(call.call());
  EXPECT_EQ(call.Wait().code(), kUnavailable);
}

TEST_F(EngineTest, ABatchWaitGathersRequests) {
  Engine::Options options = Defaults();
  options.batch_wait = absl::Milliseconds(200);
  Start(options);
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(0, 2, 1));
  engine_->Submit(a.call());
  engine_->Submit(b.call());
  EXPECT_TRUE(a.Wait().ok());
  EXPECT_TRUE(b.Wait().ok());
  ASSERT_EQ(control_->Steps().size(), 1u);
  EXPECT_EQ(control_->Steps()[0].rows(), 3);
}

TEST_F(EngineTest, ACancelAtTheDeadlineIsAnExpiry) {
  Start();
  TestCall call(NumbersRequest(0, 1, 1), absl::Now());
  engine_->Cancel(*call.call());
  EXPECT_EQ(call.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(metrics_.expired_in_queue(), 1u);
  EXPECT_EQ(metrics_.cancelled_in_queue(), 0u);
}

TEST_F(EngineTest, ABatchWaitEndsWhenEveryOpenStreamHasARequest) {
  Engine::Options options = Defaults();
  options.batch_wait = absl::Seconds(300);  // longer than a call waits here
  Start(options);
  engine_->StreamOpened();
  engine_->StreamOpened();
  TestCall a(NumbersRequest(0, 1, 1)), b(NumbersRequest(0, 2, 1)), c(NumbersRequest(0, 3, 1));
  a.call()->stream = c.call()->stream = &a;
  b.call()->stream = &b;
  engine_->Submit(a.call());
  engine_->Submit(b.call());
  EXPECT_TRUE(a.Wait().ok());
  EXPECT_TRUE(b.Wait().ok());
  ASSERT_EQ(control_->Steps().size(), 1u);
  engine_->Submit(c.call());
  engine_->StreamClosed();  // b's: only a's is left
  EXPECT_TRUE(c.Wait().ok());
  engine_->StreamClosed();
}

TEST_F(EngineTest, ManyThreadsSubmitCancelAndExpireAndEachGetsOneAnswer) {
  Start();
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t, &served] {
      for (int i = 0; i < 100; ++i) {
        const bool expires = i % 7 == 3;
        TestCall call(NumbersRequest(i % 4, i % 5 + 1, i % 3 + 1, static_cast<float>(t)),
                      expires ? absl::Now() : absl::InfiniteFuture());
        engine_->Submit(call.call());
        if (i % 5 == 4) engine_->Cancel(*call.call());
        const absl::Status status = call.Wait();
        EXPECT_EQ(call.answers(), 1);
        if (status.ok()) {
          ++served;
          EXPECT_EQ(call.output(), call.Expected());
        } else {
          EXPECT_TRUE(absl::IsCancelled(status) || absl::IsDeadlineExceeded(status)) << status;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(served.load(), 4 * 60);
  EXPECT_TRUE(engine_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(engine_->inflight_bytes(), 0);
}

}  // namespace
}  // namespace expertd
