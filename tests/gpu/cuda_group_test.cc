#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <deque>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/limits.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/moe_layer/params.h"
#include "kernels/fatal.h"
#include "kernels/reference/reference.h"
#include "tests/gpu/testing/backend_driver.h"
#include "tests/gpu/testing/device.h"
#include "tests/gpu/testing/moe_cases.h"

// The Backend on two GPUs, and what is the same as on one.
namespace expertd {
namespace {

using cuda::KernelPath;
using cuda::moe_layer::StallPoint;
using testing::FirstDifference;
using ::testing::HasSubstr;
using testing::HostBatch;
using testing::HostLayer;
using testing::Routing;
using testing::Spread;

constexpr double kBf16Bound = 5e-3;  // formats.md: BF16 activations, h and y
constexpr absl::Duration kPatience = absl::Seconds(30);
constexpr int32_t kTokens = 60;  // the most that one rank takes

class CudaGroupTest : public testing::GpuTest, public ::testing::WithParamInterface<KernelPath> {
 protected:
  static LayerSpec Spec(int32_t layer, Recipe recipe) {
    return {.layer = layer,
            .hidden_size = 320,
            .intermediate_size = 192,
            .num_experts = 9,
            .top_k = 4,
            .recipe = recipe,
            .swiglu_limit = 10};
  }

  void SetUp() override {
    testing::GpuTest::SetUp();
    if (IsSkipped()) return;
    int count = 0;
    ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    if (count < 2) GTEST_SKIP() << "needs 2 GPUs, found " << count;
    layers_ = {testing::MakeRandomLayer(Spec(2, Recipe::kMxfp4), 1),
               testing::MakeRandomLayer(Spec(5, Recipe::kNvfp4), 2)};
  }

  // Nine experts on two ranks: the last rank has an empty slot.
  cuda::CudaBackendOptions Options(int32_t ranks) const {
    cuda::CudaBackendOptions options;
    options.path = ranks == 1 ? KernelPath::kFused : GetParam();
    for (const HostLayer& layer : layers_) options.common.layers.push_back(layer.spec);
    options.common.placement = std::make_shared<const Placement>(*Placement::Contiguous(9, ranks));
    options.common.max_tokens_per_rank = ranks == 1 ? 2 * kTokens : kTokens;
    return options;
  }

  std::unique_ptr<Backend> MakeLoaded(const cuda::CudaBackendOptions& options) {
    auto backend = cuda::MakeCudaBackend(options);
    EXPECT_TRUE(backend.ok()) << backend.status();
    if (!backend.ok()) return nullptr;
    const absl::Status loaded =
        testing::LoadLayers(layers_, *options.common.placement, (*backend)->sink());
    EXPECT_TRUE(loaded.ok()) << loaded;
    return *std::move(backend);
  }

  std::vector<HostLayer> layers_;
};

INSTANTIATE_TEST_SUITE_P(Paths, CudaGroupTest,
                         ::testing::Values(KernelPath::kFused, KernelPath::kHostExchange),
                         [](const auto& info) {
                           return info.param == KernelPath::kFused ? "Fused" : "HostExchange";
                         });

TEST_P(CudaGroupTest, TheGroupSaysWhatItRunsOn) {
  const std::unique_ptr<Backend> backend = MakeLoaded(Options(2));
  ASSERT_NE(backend, nullptr);
  const BackendInfo& info = backend->info();
  EXPECT_EQ(info.num_ranks, 2);
  ASSERT_EQ(info.devices.size(), 2u);
  EXPECT_THAT(info.devices[0], HasSubstr("device 0"));
  EXPECT_THAT(info.devices[1], HasSubstr("device 1"));
  EXPECT_THAT(info.detail, HasSubstr(GetParam() == KernelPath::kFused ? "exchange rows inside it"
                                                                      : "host-launched NCCL"));
}

TEST_P(CudaGroupTest, AnswersAgreeWithTheReferenceForEveryDtypeAndRouting) {
  const std::unique_ptr<Backend> backend = MakeLoaded(Options(2));
  ASSERT_NE(backend, nullptr);
  const auto worst = testing::WorstOfEveryDtypeAndRouting(*backend, layers_);
  ASSERT_TRUE(worst.ok()) << worst.status();
  EXPECT_LT(worst->error, kBf16Bound) << worst->what;
}

TEST_P(CudaGroupTest, ARowsBitsDoNotDependOnItsRankAndRanksMayHaveNoRows) {
  const std::unique_ptr<Backend> backend = MakeLoaded(Options(2));
  ASSERT_NE(backend, nullptr);
  for (const HostLayer& layer : layers_) {
    const HostBatch batch = testing::MakeRandomBatch(layer.spec, 60, 4, Routing::kUniform, 4);
    const auto even = testing::RunStep(*backend, layer.spec, batch);
    ASSERT_TRUE(even.ok()) << even.status();
    EXPECT_LT(reference::RelL2(even->values, testing::ReferenceRows(layer, batch)), kBf16Bound);
    for (const Spread& spread : {Spread{60, 0}, {0, 60}, {1, 59}, {59, 1}, {30, 30}}) {
      const auto answer =
          testing::RunStep(*backend, layer.spec, batch, DType::kBf16, DType::kBf16, spread);
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(FirstDifference(answer->bytes, even->bytes), -1)
          << spread[0] << " + " << spread[1] << " rows";
    }
  }
  const HostBatch empty = testing::MakeRandomBatch(layers_[0].spec, 0, 4, Routing::kUniform, 1);
  EXPECT_TRUE(testing::RunStep(*backend, layers_[0].spec, empty).ok());
}

TEST_P(CudaGroupTest, ReplicasAreChosenByTheRowWithinItsRequest) {
  cuda::CudaBackendOptions options = Options(2);
  // Experts 0, 3 and 8 are on both ranks.
  options.common.placement = std::make_shared<const Placement>(
      *Placement::FromTable(9, 2, {0, 1, 2, 3, 4, 8, 5, 6, 7, 8, 0, 3}));
  const std::unique_ptr<Backend> backend = MakeLoaded(options);
  ASSERT_NE(backend, nullptr);
  for (const HostLayer& layer : layers_) {
    const HostBatch batch = testing::MakeRandomBatch(layer.spec, 60, 4, Routing::kSkewed, 5);
    const std::vector<double> expected = testing::ReferenceRows(layer, batch);
    std::vector<uint8_t> bytes;
    for (const Spread& spread : {Spread{30, 30}, {60, 0}, {7, 53}}) {
      const auto answer =
          testing::RunStep(*backend, layer.spec, batch, DType::kBf16, DType::kBf16, spread);
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_LT(reference::RelL2(answer->values, expected), kBf16Bound);
      if (bytes.empty()) bytes = answer->bytes;
      EXPECT_EQ(FirstDifference(answer->bytes, bytes), -1);
    }
  }
}

// sum_k |w_k y_k| of every element as one rank computes them: one step a choice, the others masked.
std::vector<double> SumOfMagnitudes(Backend& one, const LayerSpec& spec, const HostBatch& batch) {
  std::vector<double> sums(static_cast<size_t>(batch.num_tokens) * spec.hidden_size);
  for (int32_t k = 0; k < batch.top_k; ++k) {
    HostBatch choice = batch;
    for (size_t i = 0; i < choice.ids.size(); ++i) {
      if (static_cast<int32_t>(i % batch.top_k) != k) choice.ids[i] = -1;
    }
    const auto rows = testing::RunStep(one, spec, choice, DType::kBf16, DType::kF32);
    EXPECT_TRUE(rows.ok()) << rows.status();
    if (!rows.ok()) break;
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += std::fabs(rows->values[i]);
  }
  return sums;
}

TEST_P(CudaGroupTest, OneRankAndTwoDifferByTheOrderOfTheSumOnly) {
  const std::unique_ptr<Backend> one = MakeLoaded(Options(1));
  const std::unique_ptr<Backend> two = MakeLoaded(Options(2));
  ASSERT_TRUE(one != nullptr && two != nullptr);
  cuda::CudaBackendOptions rounded = Options(2);
  rounded.common.partials = DType::kBf16;
  const std::unique_ptr<Backend> bf16 = MakeLoaded(rounded);
  ASSERT_NE(bf16, nullptr);
  for (const HostLayer& layer : layers_) {
    const HostBatch batch = testing::MakeRandomBatch(layer.spec, 120, 4, Routing::kSkewed, 6);
    const std::vector<double> sums = SumOfMagnitudes(*one, layer.spec, batch);
    const auto a = testing::RunStep(*one, layer.spec, batch, DType::kBf16, DType::kF32);
    const auto b = testing::RunStep(*two, layer.spec, batch, DType::kBf16, DType::kF32);
    const auto c = testing::RunStep(*bf16, layer.spec, batch, DType::kBf16, DType::kF32);
    ASSERT_TRUE(a.ok() && b.ok() && c.ok()) << a.status() << b.status() << c.status();
    int64_t differ = 0;
    for (size_t i = 0; i < sums.size(); ++i) {
      const double bound =
          std::fabs(a->values[i]) * 0x1p-23 + 2 * batch.top_k * 0x1p-24 * sums[i] + 1e-30;
      ASSERT_LE(std::fabs(a->values[i] - b->values[i]), bound) << "element " << i;
      // Partials are at most the sum of magnitudes.
      ASSERT_LE(std::fabs(a->values[i] - c->values[i]), bound + 0x1p-8 * sums[i])
          << "element " << i;
      differ += b->values[i] != c->values[i];
    }
    EXPECT_GT(differ, 0) << "BF16 on the wire left no trace";
  }
}

TEST_P(CudaGroupTest, AnyKIsAnswered) {
  const std::unique_ptr<Backend> backend = MakeLoaded(Options(2));
  ASSERT_NE(backend, nullptr);
  const LayerSpec& spec = layers_[1].spec;
  for (const Spread& spread : {Spread{60, 60}, {60, 0}, {1, 60}, {5, 3}}) {
    const HostBatch batch =
        testing::MakeRandomBatch(spec, spread[0] + spread[1], 32, Routing::kMasked, 7);
    const auto answer = testing::RunStep(*backend, spec, batch, DType::kBf16, DType::kF32, spread);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_LT(reference::RelL2(answer->values, testing::ReferenceRows(layers_[1], batch)),
              kBf16Bound)
        << spread[0] << " + " << spread[1] << " rows";
  }
}

TEST_P(CudaGroupTest, StepsInFlightOfDifferentLayersAndSizesAnswerRight) {
  const std::unique_ptr<Backend> backend = MakeLoaded(Options(2));
  ASSERT_NE(backend, nullptr);
  constexpr Spread::value_type kSizes[][2] = {{60, 60}, {0, 1}, {1, 0}, {17, 60}, {60, 5}, {0, 0}};
  std::vector<HostBatch> batches;
  std::vector<std::vector<uint8_t>> right;
  for (int i = 0; i < 6; ++i) {
    const LayerSpec& spec = layers_[i % 2].spec;
    batches.push_back(
        testing::MakeRandomBatch(spec, kSizes[i][0] + kSizes[i][1], 4, Routing::kSkewed, 20 + i));
    const auto alone = testing::RunStep(*backend, spec, batches[i], DType::kBf16, DType::kBf16,
                                        {kSizes[i][0], kSizes[i][1]});
    ASSERT_TRUE(alone.ok()) << alone.status();
    right.push_back(alone->bytes);
  }
  struct Flying {
    int which;
    StepMemory* memory;
    MoeStep step;
    std::future<StepResult> result;
  };
  std::deque<Flying> flying;
  const auto land = [&] {
    Flying first = std::move(flying.front());
    flying.pop_front();
    const StepResult result = first.result.get();
    ASSERT_TRUE(result.status.ok()) << result.status;
    const auto bytes = testing::OutputBytes(first.step, layers_[0].spec.hidden_size);
    ASSERT_EQ(FirstDifference(bytes, right[first.which]), -1);
    backend->ReleaseStep(first.memory);
  };
  for (int i = 0; i < 300 && !HasFatalFailure(); ++i) {
    const int which = i * 7 % 6;
    auto memory = backend->AcquireStep(absl::Now() + kPatience);
    ASSERT_TRUE(memory.ok()) << memory.status();
    Flying next = {which, *memory, {}, {}};
    next.step = testing::FillStep(**memory, layers_[which % 2].spec, batches[which], DType::kBf16,
                                  DType::kBf16, {kSizes[which][0], kSizes[which][1]});
    auto ended = std::make_shared<std::promise<StepResult>>();
    next.result = ended->get_future();
    if (static_cast<int>(flying.size()) == limits::kStepsInFlight) land();
    const absl::Status submitted =
        backend->Submit(next.step, [ended](StepResult result) { ended->set_value(result); });
    ASSERT_TRUE(submitted.ok()) << submitted;
    flying.push_back(std::move(next));
  }
  while (!flying.empty() && !HasFatalFailure()) land();
}

TEST_P(CudaGroupTest, AbortEndsWhatRunsAndWhatIsStagedOnAllRanks) {
  const std::unique_ptr<Backend> backend = MakeLoaded(Options(2));
  ASSERT_NE(backend, nullptr);
  const LayerSpec& spec = layers_[1].spec;
  const HostBatch batch = testing::MakeRandomBatch(spec, 100, 4, Routing::kUniform, 8);
  std::vector<std::future<absl::Status>> answers;
  for (int i = 0; i < limits::kStepsInFlight; ++i) {
    auto memory = backend->AcquireStep(absl::Now() + kPatience);
    ASSERT_TRUE(memory.ok());
    auto answer = std::make_shared<std::promise<absl::Status>>();
    answers.push_back(answer->get_future());
    ASSERT_TRUE(backend
                    ->Submit(testing::FillStep(**memory, spec, batch, DType::kF32, DType::kF32),
                             [answer](StepResult result) { answer->set_value(result.status); })
                    .ok());
  }
  backend->AbortSteps(absl::UnavailableError("a rank is lost"));
  for (std::future<absl::Status>& answer : answers) {
    ASSERT_EQ(answer.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    const absl::Status status = answer.get();
    EXPECT_TRUE(status.ok() || status == absl::UnavailableError("a rank is lost")) << status;
  }
  EXPECT_EQ(testing::RunStep(*backend, spec, batch).status(),
            absl::UnavailableError("a rank is lost"));
}

TEST_P(CudaGroupTest, WrongStepsNameTheRank) {
  const std::unique_ptr<Backend> backend = MakeLoaded(Options(2));
  ASSERT_NE(backend, nullptr);
  const HostBatch batch = testing::MakeRandomBatch(layers_[0].spec, 6, 4, Routing::kUniform, 9);
  auto memory = backend->AcquireStep(absl::Now() + kPatience);
  ASSERT_TRUE(memory.ok());
  MoeStep step = testing::FillStep(**memory, layers_[0].spec, batch, DType::kBf16, DType::kBf16);
  step.ranks[1].ids[5] = 9;
  const auto never = [](StepResult) { ADD_FAILURE() << "called"; };
  const absl::Status status = backend->Submit(step, never);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_EQ(status.message(), "rank 1: id of token 1, choice 1 is 9, must be -1 or below 9");
  step.ranks.pop_back();
  EXPECT_EQ(backend->Submit(step, never).message(), "the step has 1 ranks, the process 2");
  backend->ReleaseStep(*memory);
}

struct Stall {
  StallPoint point;
  const char* text;  // of the status, when rank 1 leaves it out
};

class CudaGroupFaultTest : public CudaGroupTest {
 protected:
  static constexpr absl::Duration kStepTimeout = absl::Seconds(2);

  // More FC1 tiles than CTAs, so that no CTA is left to wait for what others wait for.
  void SetUp() override {
    CudaGroupTest::SetUp();
    if (IsSkipped()) return;
    LayerSpec spec = Spec(2, Recipe::kMxfp4);
    spec.intermediate_size = 4096;
    layers_ = {testing::MakeRandomLayer(spec, 1)};
  }

  cuda::CudaBackendOptions StallingOptions() {
    cuda::CudaBackendOptions options = Options(2);
    options.common.step_timeout = kStepTimeout;
    options.stall = [this](int32_t rank) {
      return rank == 1 ? stall_.load() : cuda::moe_layer::kStallNowhere;
    };
    return options;
  }

  std::atomic<StallPoint> stall_ = cuda::moe_layer::kStallNowhere;
};

INSTANTIATE_TEST_SUITE_P(Paths, CudaGroupFaultTest,
                         ::testing::Values(KernelPath::kFused, KernelPath::kHostExchange),
                         [](const auto& info) {
                           return info.param == KernelPath::kFused ? "Fused" : "HostExchange";
                         });

TEST_P(CudaGroupFaultTest, AStalledRankFailsTheStepByNameAndTheNextStepIsRight) {
  const std::unique_ptr<Backend> backend = MakeLoaded(StallingOptions());
  ASSERT_NE(backend, nullptr);
  const LayerSpec& spec = layers_[0].spec;
  const HostBatch batch = testing::MakeRandomBatch(spec, 100, 4, Routing::kUniform, 10);
  const auto right = testing::RunStep(*backend, spec, batch);
  ASSERT_TRUE(right.ok()) << right.status();
  std::vector<Stall> stalls = {{cuda::moe_layer::kStallRoutes, "rank 1 did not answer in "},
                               {cuda::moe_layer::kStallTokens, "rank 1 did not answer in "},
                               // Rank 1 waits for itself a quarter longer than rank 0 waits for it.
                               {cuda::moe_layer::kStallFc1, "rank 1 did not answer in "},
                               {cuda::moe_layer::kStallFc2, "rank 1 did not answer in "},
                               {cuda::moe_layer::kStallPartials, "rank 1 did not answer in "}};
  if (GetParam() == KernelPath::kHostExchange) {  // its kernel has no peers
    stalls = {{cuda::moe_layer::kStallFc1, "rank 1"}, {cuda::moe_layer::kStallFc2, "rank 1"}};
  }
  for (const Stall& stall : stalls) {
    stall_ = stall.point;
    const absl::Time start = absl::Now();
    const absl::Status status = testing::RunStep(*backend, spec, batch).status();
    const absl::Duration took = absl::Now() - start;
    stall_ = cuda::moe_layer::kStallNowhere;
    EXPECT_THAT(std::string(status.message()), HasSubstr(stall.text)) << status;
    EXPECT_FALSE(IsFatal(status)) << status;
    EXPECT_LT(took, kStepTimeout);
    if (GetParam() == KernelPath::kFused) {
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    }
    std::printf("stall point %d: %s (%.0f ms)\n", static_cast<int>(stall.point),
                std::string(status.message()).c_str(), absl::ToDoubleMilliseconds(took));
    for (int i = 0; i < 3; ++i) {
      const auto next = testing::RunStep(*backend, spec, batch);
      ASSERT_TRUE(next.ok()) << next.status();
      EXPECT_EQ(FirstDifference(next->bytes, right->bytes), -1);
    }
  }
}

TEST_P(CudaGroupFaultTest, AStepBehindAFailedOneIsNotBelieved) {
  const std::unique_ptr<Backend> backend = MakeLoaded(StallingOptions());
  ASSERT_NE(backend, nullptr);
  const LayerSpec& spec = layers_[0].spec;
  const HostBatch batch = testing::MakeRandomBatch(spec, 100, 4, Routing::kUniform, 11);
  const auto right = testing::RunStep(*backend, spec, batch);
  ASSERT_TRUE(right.ok()) << right.status();
  stall_ = cuda::moe_layer::kStallFc1;
  std::vector<StepMemory*> memories;
  std::vector<std::future<absl::Status>> answers;
  for (int i = 0; i < limits::kStepsInFlight; ++i) {
    auto memory = backend->AcquireStep(absl::Now() + kPatience);
    ASSERT_TRUE(memory.ok());
    memories.push_back(*memory);
    auto answer = std::make_shared<std::promise<absl::Status>>();
    answers.push_back(answer->get_future());
    ASSERT_TRUE(backend
                    ->Submit(testing::FillStep(**memory, spec, batch, DType::kBf16, DType::kBf16),
                             [answer](StepResult result) { answer->set_value(result.status); })
                    .ok());
  }
  for (std::future<absl::Status>& answer : answers) {
    ASSERT_EQ(answer.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    EXPECT_FALSE(answer.get().ok());
  }
  for (StepMemory* memory : memories) backend->ReleaseStep(memory);
  stall_ = cuda::moe_layer::kStallNowhere;
  const auto next = testing::RunStep(*backend, spec, batch);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(FirstDifference(next->bytes, right->bytes), -1);
}

}  // namespace
}  // namespace expertd
