#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/kernels/cpu/cpu_fixture.h"

// Creation, loading, steps in flight, wrong arguments, deadlines and aborts.
namespace expertd::testing {
namespace {

using ::testing::HasSubstr;

const LayerSpec kSpec = MakeSpec(Recipe::kMxfp4, 64, 32, 4);

absl::Time Soon() { return absl::Now() + absl::Milliseconds(20); }

cpu::CpuBackendOptions Options(int32_t num_ranks) {
  cpu::CpuBackendOptions options;
  options.common.layers = {kSpec};
  options.common.placement =
      std::make_shared<const Placement>(*Placement::Contiguous(kSpec.num_experts, num_ranks));
  options.common.max_tokens_per_rank = 8;
  options.common.num_threads = 2;
  return options;
}

// Two processes in one: each owns a rank, both share an exchange. A step that only one of them
// submits waits for the other.
struct TwoProcesses {
  explicit TwoProcesses(absl::Duration timeout) : experts(kSpec, 1) {
    cpu::CpuBackendOptions options = Options(2);
    options.exchange = MakeInProcessExchange(2);
    options.common.step_timeout = timeout;
    options.num_local_ranks = 1;
    first = MakeLoaded(experts, options);
    options.first_rank = 1;
    second = MakeLoaded(experts, options);
  }

  MoeStep EmptyStep(uint64_t number) const {
    MoeStep step;
    step.step = number;
    step.layer = kSpec.layer;
    step.top_k = 1;
    step.ranks.resize(1);
    return step;
  }

  RandomExperts experts;
  std::unique_ptr<Backend> first;
  std::unique_ptr<Backend> second;
};

TEST(CpuBackendLifecycle, AnswersAcrossProcessesThroughAGivenExchange) {
  TwoProcesses two(absl::Seconds(20));
  const Rows rows = RandomRows(kSpec, 8, 3, 2);
  auto other = std::async(std::launch::async,
                          [&] { return RunAndWait(*two.second, two.EmptyStep(0)).status; });
  const auto output = RunStep(*two.first, kSpec, rows);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_TRUE(other.get().ok());
  EXPECT_LT(reference::RelL2(*output, Expected(two.experts, rows)), 5e-6);
}

TEST(CpuBackendLifecycle, AStepWhosePeerIsAbsentEndsAndSaysWhoWaitedForWhom) {
  TwoProcesses two(absl::Milliseconds(50));
  const StepResult alone = RunAndWait(*two.first, two.EmptyStep(0));
  EXPECT_EQ(alone.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(alone.status.message()),
              HasSubstr("step 0 round 0 dispatch: rank 0 waited for the rows of rank 1"));
}

TEST(CpuBackendLifecycle, TheStepAfterAFailedOneRuns) {
  TwoProcesses two(absl::Seconds(5));
  const auto late = [&] { return RunAndWait(*two.second, two.EmptyStep(1)).status; };
  EXPECT_EQ(RunAndWait(*two.first, two.EmptyStep(0)).status.code(),
            absl::StatusCode::kDeadlineExceeded);
  auto other = std::async(std::launch::async, late);
  EXPECT_TRUE(RunAndWait(*two.first, two.EmptyStep(1)).status.ok());
  EXPECT_TRUE(other.get().ok());
}

TEST(CpuBackendLifecycle, AnAbortEndsWhatRunsAndRefusesWhatComes) {
  TwoProcesses two(absl::Seconds(30));
  std::vector<std::promise<StepResult>> done(2);
  for (uint64_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(
        two.first
            ->Submit(two.EmptyStep(i), [&done, i](StepResult result) { done[i].set_value(result); })
            .ok());
  }
  const absl::Time start = absl::Now();
  two.first->AbortSteps(absl::UnavailableError("generation 7 ended"));
  for (std::promise<StepResult>& promise : done) {
    EXPECT_EQ(promise.get_future().get().status, absl::UnavailableError("generation 7 ended"));
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_EQ(two.first->Submit(two.EmptyStep(2), [](StepResult) {}),
            absl::UnavailableError("generation 7 ended"));
}

TEST(CpuBackendLifecycle, TwoStepsAreInFlightAndCallbacksComeInOrder) {
  TwoProcesses two(absl::Seconds(30));
  std::mutex mutex;
  std::vector<uint64_t> order;
  std::promise<void> all_done;
  const auto submit = [&](Backend& backend, uint64_t number, bool watch) {
    return backend.Submit(two.EmptyStep(number), [&, number, watch](StepResult result) {
      EXPECT_TRUE(result.status.ok()) << result.status;
      if (!watch) return;
      std::lock_guard lock(mutex);
      order.push_back(number);
      if (order.size() == 2) all_done.set_value();
    });
  };
  ASSERT_TRUE(submit(*two.first, 0, true).ok());
  ASSERT_TRUE(submit(*two.first, 1, true).ok());
  EXPECT_EQ(submit(*two.first, 2, true).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(submit(*two.second, 0, false).ok());
  ASSERT_TRUE(submit(*two.second, 1, false).ok());
  all_done.get_future().wait();
  EXPECT_EQ(order, (std::vector<uint64_t>{0, 1}));
}

TEST(CpuBackendLifecycle, ManyStepsInFlightEndInOrderWithTheirOwnAnswers) {
  const RandomExperts experts(kSpec, 3);
  auto options = Options(4);
  options.common.num_threads = 4;
  const auto backend = MakeLoaded(experts, options);
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t finished = 0;
  for (uint64_t number = 0; number < 200; ++number) {
    MoeStep step;
    step.step = number;
    step.layer = kSpec.layer;
    step.top_k = 1;
    step.ranks.resize(4);
    {
      std::unique_lock lock(mutex);
      ASSERT_TRUE(
          changed.wait_for(lock, std::chrono::seconds(20), [&] { return number < finished + 2; }));
    }
    ASSERT_TRUE(backend
                    ->Submit(step,
                             [&, number](StepResult result) {
                               EXPECT_TRUE(result.status.ok()) << result.status;
                               std::lock_guard lock(mutex);
                               EXPECT_EQ(finished, number);
                               ++finished;
                               changed.notify_one();
                             })
                    .ok());
  }
  std::unique_lock lock(mutex);
  EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return finished == 200; }));
}

TEST(CpuBackendLifecycle, AComputationPastItsDeadlineNamesRankAndPhase) {
  const RandomExperts experts(kSpec, 4);
  auto options = Options(1);
  options.common.step_timeout = absl::Nanoseconds(1);
  const auto backend = MakeLoaded(experts, options);
  const auto output = RunStep(*backend, kSpec, RandomRows(kSpec, 8, 2, 5));
  EXPECT_EQ(output.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(output.status().message()),
              HasSubstr("step 0 layer 3: rank 0 reached the step's deadline in FC1"));
}

TEST(CpuBackendLifecycle, TheDestructorWaitsForSubmittedSteps) {
  const RandomExperts experts(kSpec, 6);
  auto backend = MakeLoaded(experts, Options(2));
  MoeStep step;
  step.layer = kSpec.layer;
  step.top_k = 1;
  step.ranks.resize(2);
  int done = 0;
  ASSERT_TRUE(backend->Submit(step, [&](StepResult) { ++done; }).ok());
  step.step = 1;
  ASSERT_TRUE(backend->Submit(step, [&](StepResult) { ++done; }).ok());
  backend.reset();
  EXPECT_EQ(done, 2);
}

TEST(CpuBackendLifecycle, StepMemoriesAreBounded) {
  const RandomExperts experts(kSpec, 7);
  const auto backend = MakeLoaded(experts, Options(2));
  std::vector<StepMemory*> taken;
  for (int i = 0; i < limits::kStepMemories; ++i) {
    const auto memory = backend->AcquireStep(Soon());
    ASSERT_TRUE(memory.ok());
    EXPECT_EQ((*memory)->ranks.size(), 2u);
    taken.push_back(*memory);
  }
  EXPECT_EQ(backend->AcquireStep(Soon()).status().code(), absl::StatusCode::kResourceExhausted);
  std::thread other([&] { backend->ReleaseStep(taken[1]); });
  const auto again = backend->AcquireStep(absl::Now() + absl::Seconds(20));
  other.join();
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, taken[1]);
}

TEST(CpuBackendLifecycle, WrongStepsAreRefusedWithoutACallback) {
  const RandomExperts experts(kSpec, 8);
  const auto backend = MakeLoaded(experts, Options(1));
  StepMemory* memory = *backend->AcquireStep(Soon());
  MoeStep good;
  good.layer = kSpec.layer;
  good.top_k = 2;
  good.ranks = memory->ranks;
  const auto refusal = [&](const MoeStep& step) {
    return backend->Submit(step, [](StepResult) { ADD_FAILURE() << "called"; });
  };
  MoeStep step = good;
  step.ranks[0].num_tokens = 9;
  EXPECT_EQ(refusal(step),
            absl::InvalidArgumentError("rank 0: got 9 tokens, the buffer is sized for 8"));
  step = good;
  step.layer = 9;
  EXPECT_EQ(refusal(step).code(), absl::StatusCode::kNotFound);
  step = good;
  step.top_k = limits::kMaxTopK + 1;
  EXPECT_EQ(refusal(step).code(), absl::StatusCode::kInvalidArgument);
  step = good;
  step.ranks.clear();
  EXPECT_EQ(refusal(step).code(), absl::StatusCode::kInvalidArgument);
  step = good;
  step.ranks[0].num_tokens = 1;
  for (const int32_t id : {-2, 4}) {
    memory->ranks[0].ids[0] = 0;
    memory->ranks[0].ids[1] = id;
    EXPECT_EQ(refusal(step).code(), absl::StatusCode::kInvalidArgument) << id;
  }
  memory->ranks[0].ids[1] = 0;
  memory->ranks[0].row_in_request[0] = -1;
  EXPECT_EQ(refusal(step).code(), absl::StatusCode::kInvalidArgument);
  memory->ranks[0].row_in_request[0] = 0;
  step.ranks[0].output = nullptr;
  EXPECT_EQ(refusal(step).code(), absl::StatusCode::kInvalidArgument);
}

TEST(CpuBackendLifecycle, StepsAscend) {
  const RandomExperts experts(kSpec, 11);
  const auto backend = MakeLoaded(experts, Options(2));
  MoeStep step;
  step.layer = kSpec.layer;
  step.top_k = 1;
  step.ranks.resize(2);
  step.step = 4;
  EXPECT_TRUE(RunAndWait(*backend, step).status.ok());
  EXPECT_EQ(RunAndWait(*backend, step).status.code(), absl::StatusCode::kInvalidArgument);
  step.generation = 1;
  step.step = 0;
  EXPECT_TRUE(RunAndWait(*backend, step).status.ok());
}

TEST(CpuBackendLifecycle, TheTokenLimitItselfIsServed) {
  const RandomExperts experts(kSpec, 9);
  const auto backend = MakeLoaded(experts, Options(1));
  const Rows rows = RandomRows(kSpec, 8, limits::kMaxTopK, 10);
  const auto output = RunStep(*backend, kSpec, rows);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_LT(reference::RelL2(*output, Expected(experts, rows)), 5e-6);
}

TEST(CpuBackendLifecycle, NoStepBeforeTheWeightsAreComplete) {
  auto backend = *cpu::MakeCpuBackend(Options(1));
  MoeStep step;
  step.layer = kSpec.layer;
  step.top_k = 1;
  step.ranks.resize(1);
  EXPECT_EQ(backend->Submit(step, [](StepResult) {}).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(CpuBackendLifecycle, WrongOptionsAreRefused) {
  const auto code = [](const cpu::CpuBackendOptions& options) {
    return cpu::MakeCpuBackend(options).status().code();
  };
  auto options = Options(2);
  options.common.layers.clear();
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Options(2);
  options.common.layers[0].hidden_size = 48;
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Options(2);
  options.common.layers[0].num_experts = 5;
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Options(2);
  options.common.max_tokens_per_rank = 0;
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Options(2);
  options.num_local_ranks = 1;  // and no exchange
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
  options = Options(2);
  options.exchange = MakeInProcessExchange(3);
  EXPECT_EQ(code(options), absl::StatusCode::kInvalidArgument);
}

TEST(CpuBackendLifecycle, WhatDoesNotFitIsRefusedWithTheLargestThatDoes) {
  auto options = Options(2);
  options.common.max_tokens_per_rank = 4096;
  const int64_t whole = [&] {
    const auto backend = *cpu::MakeCpuBackend(options);
    return backend->info().weight_bytes + backend->info().workspace_bytes;
  }();
  options.memory_limit = {whole + limits::kCpuReserveBytes, "of the test"};
  EXPECT_TRUE(cpu::MakeCpuBackend(options).ok());

  options.memory_limit.bytes -= 1;
  absl::Status status = cpu::MakeCpuBackend(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              ::testing::StartsWith(absl::StrCat("memory: ", whole, " bytes needed (weights ")));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("found ", options.memory_limit.bytes, " of the test")));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the largest max_tokens_per_rank that fits is 4095"));
  options.common.max_tokens_per_rank = 4095;
  EXPECT_TRUE(cpu::MakeCpuBackend(options).ok());

  options.memory_limit.bytes = limits::kCpuReserveBytes + 1;
  status = cpu::MakeCpuBackend(options).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("no max_tokens_per_rank fits"));
}

// In a process of its own, which may not map as many stacks as it wants.
TEST(CpuBackendLifecycleDeathTest, TooFewThreadsAreAStatus) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto make = [] {
    const rlimit space = {1 << 30, 1 << 30};
    if (setrlimit(RLIMIT_AS, &space) != 0) std::exit(1);
    auto options = Options(1);
    options.common.num_threads = limits::kMaxThreads;
    const absl::Status status = cpu::MakeCpuBackend(options).status();
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::exit(0);
  };
  EXPECT_EXIT(make(), ::testing::ExitedWithCode(0),
              "RESOURCE_EXHAUSTED: threads: the system gives no more");
}

TEST(CpuBackendLifecycle, InfoTellsWhatIsHeld) {
  const auto backend = *cpu::MakeCpuBackend(Options(2));
  const BackendInfo& info = backend->info();
  EXPECT_EQ(info.name, "cpu");
  EXPECT_EQ(info.num_ranks, 2);
  EXPECT_EQ(info.devices.size(), 2u);
  EXPECT_EQ(info.max_tokens_per_rank, 8);
  EXPECT_GE(info.weight_bytes, 4 * 3 * 64 * 32 / 2);
  EXPECT_GT(info.workspace_bytes, 0);
  EXPECT_FALSE(info.detail.empty());
}

}  // namespace
}  // namespace expertd::testing
