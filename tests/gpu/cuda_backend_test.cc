#include "kernels/cuda/cuda_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "config/limits.h"
#include "kernels/fatal.h"
#include "kernels/reference/reference.h"
#include "tests/gpu/testing/backend_driver.h"
#include "tests/gpu/testing/device.h"
#include "tests/gpu/testing/moe_cases.h"

namespace expertd {
namespace {

using testing::FirstDifference;
using ::testing::HasSubstr;
using testing::HostBatch;
using testing::HostLayer;
using testing::Routing;

// formats.md: BF16 activations, h and y rounded to BF16 in the fused kernel.
constexpr double kBf16Bound = 5e-3;
constexpr absl::Duration kPatience = absl::Seconds(30);

class CudaBackendTest : public testing::GpuTest,
                        public ::testing::WithParamInterface<cuda::KernelPath> {
 protected:
  static LayerSpec Spec(int32_t layer, Recipe recipe, int32_t experts = 8) {
    return {.layer = layer,
            .hidden_size = 320,
            .intermediate_size = 192,
            .num_experts = experts,
            .top_k = 4,
            .recipe = recipe,
            .swiglu_limit = 10};
  }

  void SetUp() override {
    testing::GpuTest::SetUp();
    if (IsSkipped()) return;
    layers_ = {testing::MakeRandomLayer(Spec(2, Recipe::kMxfp4), 1),
               testing::MakeRandomLayer(Spec(5, Recipe::kNvfp4), 2)};
    options_.path = GetParam();
    options_.common.layers = {layers_[0].spec, layers_[1].spec};
    // Three experts have a replica.
    options_.common.placement = std::make_shared<const Placement>(
        *Placement::FromTable(8, 1, {0, 1, 2, 3, 4, 5, 6, 7, 0, 3, 7}));
    options_.common.max_tokens_per_rank = 100;
  }

  std::unique_ptr<Backend> MakeLoaded() {
    auto backend = cuda::MakeCudaBackend(options_);
    EXPECT_TRUE(backend.ok()) << backend.status();
    if (!backend.ok()) return nullptr;
    const absl::Status loaded =
        testing::LoadLayers(layers_, *options_.common.placement, (*backend)->sink());
    EXPECT_TRUE(loaded.ok()) << loaded;
    return *std::move(backend);
  }

  std::vector<HostLayer> layers_;
  cuda::CudaBackendOptions options_;
};

INSTANTIATE_TEST_SUITE_P(Paths, CudaBackendTest,
                         ::testing::Values(cuda::KernelPath::kFused, cuda::KernelPath::kUnfused),
                         [](const auto& info) {
                           return info.param == cuda::KernelPath::kFused ? "Fused" : "Unfused";
                         });

TEST_P(CudaBackendTest, AnswersAgreeWithTheReferenceForEveryDtypeAndRouting) {
  const std::unique_ptr<Backend> backend = MakeLoaded();
  ASSERT_NE(backend, nullptr);
  const auto worst = testing::WorstOfEveryDtypeAndRouting(*backend, layers_);
  ASSERT_TRUE(worst.ok()) << worst.status();
  EXPECT_LT(worst->error, kBf16Bound) << worst->what;
}

// The workspace is for the layers' own K: a larger one takes several launches.
TEST_P(CudaBackendTest, AnyKIsAnsweredAndManyRowsOfALargeOneRunInParts) {
  const std::unique_ptr<Backend> backend = MakeLoaded();
  ASSERT_NE(backend, nullptr);
  const LayerSpec& spec = layers_[0].spec;
  for (const auto& [tokens, top_k] : {std::pair(1, 32), {12, 32}, {13, 32}, {100, 32}, {100, 7}}) {
    const HostBatch batch =
        testing::MakeRandomBatch(spec, tokens, top_k, Routing::kMasked, 11 + top_k);
    const auto answer = testing::RunStep(*backend, spec, batch, DType::kBf16, DType::kF32);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_LT(reference::RelL2(answer->values, testing::ReferenceRows(layers_[0], batch)),
              kBf16Bound)
        << tokens << " tokens, K " << top_k;
  }
}

TEST_P(CudaBackendTest, AStepWithoutRowsIsANormalStep) {
  const std::unique_ptr<Backend> backend = MakeLoaded();
  ASSERT_NE(backend, nullptr);
  const HostBatch empty = testing::MakeRandomBatch(layers_[0].spec, 0, 4, Routing::kUniform, 1);
  EXPECT_TRUE(testing::RunStep(*backend, layers_[0].spec, empty).ok());
}

TEST_P(CudaBackendTest, ARowsBitsDoNotDependOnTheBatchOrTheRun) {
  const std::unique_ptr<Backend> backend = MakeLoaded();
  ASSERT_NE(backend, nullptr);
  for (const HostLayer& layer : layers_) {
    const HostBatch batch = testing::MakeRandomBatch(layer.spec, 100, 4, Routing::kSkewed, 4);
    const auto whole = testing::RunStep(*backend, layer.spec, batch);
    const auto again = testing::RunStep(*backend, layer.spec, batch);
    ASSERT_TRUE(whole.ok() && again.ok());
    EXPECT_EQ(FirstDifference(whole->bytes, again->bytes), -1);
    const int64_t row_bytes = layer.spec.hidden_size * 2;
    for (const int32_t row : {0, 41, 99}) {
      const HostBatch alone =
          testing::SelectRows(batch, layer.spec.hidden_size, absl::MakeConstSpan(&row, 1));
      const auto single = testing::RunStep(*backend, layer.spec, alone);
      ASSERT_TRUE(single.ok());
      const auto begin = whole->bytes.begin() + row * row_bytes;
      EXPECT_EQ(FirstDifference(single->bytes, {begin, begin + row_bytes}), -1) << "row " << row;
    }
  }
}

TEST_P(CudaBackendTest, TwoStepsInFlightEndInOrderAndAThirdIsRefused) {
  const std::unique_ptr<Backend> backend = MakeLoaded();
  ASSERT_NE(backend, nullptr);
  const LayerSpec& spec = layers_[0].spec;
  const HostBatch batch = testing::MakeRandomBatch(spec, 100, 4, Routing::kUniform, 5);
  const std::vector<double> expected = testing::ReferenceRows(layers_[0], batch);
  std::vector<StepMemory*> memories;
  std::vector<MoeStep> steps;
  for (int i = 0; i < 3; ++i) {
    auto memory = backend->AcquireStep(absl::Now() + kPatience);
    ASSERT_TRUE(memory.ok());
    memories.push_back(*memory);
    steps.push_back(testing::FillStep(**memory, spec, batch, DType::kF32, DType::kF32));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(backend->AcquireStep(absl::Now()).status()));

  int32_t refused = 0;
  for (int round = 0; round < 50; ++round) {  // many, so that the order is not luck
    std::mutex mutex;
    std::condition_variable ended;
    std::vector<int> accepted;
    std::vector<int> order;
    for (int i = 0; i < 3; ++i) {
      const absl::Status status = backend->Submit(steps[i], [&, i](StepResult result) {
        EXPECT_TRUE(result.status.ok()) << result.status;
        std::lock_guard lock(mutex);
        order.push_back(i);
        ended.notify_one();
      });
      if (status.ok()) accepted.push_back(i);
      refused += absl::IsResourceExhausted(status);
    }
    std::unique_lock lock(mutex);
    ASSERT_TRUE(ended.wait_for(lock, std::chrono::seconds(30),
                               [&] { return order.size() == accepted.size(); }));
    EXPECT_EQ(order, accepted);
  }
  EXPECT_GT(refused, 0);
  for (int i = 0; i < 3; ++i) backend->ReleaseStep(memories[i]);
  const auto after = testing::RunStep(*backend, spec, batch, DType::kF32, DType::kF32);
  ASSERT_TRUE(after.ok());
  EXPECT_LT(reference::RelL2(after->values, expected), kBf16Bound);
}

TEST_P(CudaBackendTest, WrongStepsAreRefusedWithoutACall) {
  const std::unique_ptr<Backend> backend = MakeLoaded();
  ASSERT_NE(backend, nullptr);
  const LayerSpec& spec = layers_[0].spec;
  const auto refusal = [&](auto change) {
    HostBatch batch = testing::MakeRandomBatch(spec, 3, 2, Routing::kUniform, 6);
    auto memory = backend->AcquireStep(absl::Now() + kPatience);
    EXPECT_TRUE(memory.ok());
    MoeStep step = testing::FillStep(**memory, spec, batch, DType::kBf16, DType::kBf16);
    change(step);
    const absl::Status status =
        backend->Submit(step, [](StepResult) { ADD_FAILURE() << "called"; });
    backend->ReleaseStep(*memory);
    return status;
  };
  EXPECT_TRUE(absl::IsNotFound(refusal([](MoeStep& step) { step.layer = 3; })));
  EXPECT_TRUE(absl::IsInvalidArgument(refusal([](MoeStep& step) { step.top_k = 33; })));
  EXPECT_TRUE(absl::IsInvalidArgument(refusal([](MoeStep& step) { step.top_k = 0; })));
  EXPECT_TRUE(absl::IsInvalidArgument(refusal([](MoeStep& step) { step.ranks[0].ids[5] = 8; })));
  EXPECT_TRUE(absl::IsInvalidArgument(refusal([](MoeStep& step) { step.ranks[0].ids[0] = -2; })));
  const absl::Status too_many = refusal([](MoeStep& step) { step.ranks[0].num_tokens = 101; });
  EXPECT_EQ(too_many.message(), "got 101 tokens, the buffer is sized for 100");
}

TEST_P(CudaBackendTest, MissingMatricesAreListedAndStepsWaitForThem) {
  auto backend = cuda::MakeCudaBackend(options_);
  ASSERT_TRUE(backend.ok()) << backend.status();
  WeightSink& sink = (*backend)->sink();
  const MatrixId id = {0, 2, 0, Matrix::kUp};
  ASSERT_TRUE(sink.Reserve(id, absl::Now() + kPatience).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(sink.Reserve(id, absl::Now()).status()));
  ASSERT_TRUE(sink.Commit(id, 1).ok());
  EXPECT_FALSE(sink.Commit(id, 1).ok());
  EXPECT_TRUE(absl::IsNotFound(sink.Reserve({0, 3, 0, Matrix::kUp}, absl::Now()).status()));
  const absl::Status status = sink.Finish();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("65 matrices were not loaded"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 2 slot 0 gate"));
  const HostBatch batch = testing::MakeRandomBatch(layers_[0].spec, 1, 1, Routing::kUniform, 1);
  EXPECT_TRUE(
      absl::IsFailedPrecondition(testing::RunStep(**backend, layers_[0].spec, batch).status()));
}

TEST_P(CudaBackendTest, AReservationWaitsForABufferUntilItsDeadline) {
  auto backend = cuda::MakeCudaBackend(options_);
  ASSERT_TRUE(backend.ok()) << backend.status();
  WeightSink& sink = (*backend)->sink();
  absl::Status status;
  int32_t reserved = 0;
  for (const int32_t layer : {2, 5}) {
    for (int32_t slot = 0; slot < 11 && status.ok(); ++slot) {
      for (const Matrix matrix : {Matrix::kGate, Matrix::kUp, Matrix::kDown}) {
        status =
            sink.Reserve({0, layer, slot, matrix}, absl::Now() + absl::Milliseconds(10)).status();
        if (!status.ok()) break;
        ++reserved;
      }
    }
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status << " after " << reserved;
}

TEST_P(CudaBackendTest, AbortedStepsAnswerWithTheReasonForGood) {
  const std::unique_ptr<Backend> backend = MakeLoaded();
  ASSERT_NE(backend, nullptr);
  const HostBatch batch = testing::MakeRandomBatch(layers_[0].spec, 10, 2, Routing::kUniform, 8);
  ASSERT_TRUE(testing::RunStep(*backend, layers_[0].spec, batch).ok());
  backend->AbortSteps(absl::UnavailableError("the generation is over"));
  const absl::Status status = testing::RunStep(*backend, layers_[0].spec, batch).status();
  EXPECT_EQ(status, absl::UnavailableError("the generation is over"));
}

TEST_P(CudaBackendTest, AbortEndsWhatRunsAndWhatIsStaged) {
  const std::unique_ptr<Backend> backend = MakeLoaded();
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
    ASSERT_EQ(answer.wait_for(std::chrono::seconds(5)), std::future_status::ready);
    const absl::Status status = answer.get();
    EXPECT_TRUE(status.ok() || status == absl::UnavailableError("a rank is lost")) << status;
  }
}

// Steps are told to stop at every moment of their life: each either answers right or not at all,
// and the backend goes on afterwards.
TEST_P(CudaBackendTest, AStepThatIsStoppedNeverAnswersAWrongNumber) {
  // One long FC1 tile that every FC2 tile waits for: waits that look at the stop word.
  const LayerSpec spec = {
      .layer = 0, .hidden_size = 32768, .intermediate_size = 64, .num_experts = 1, .top_k = 1};
  const HostLayer layer = testing::MakeRandomLayer(spec, 9);
  const HostBatch batch = testing::MakeRandomBatch(spec, 64, 1, Routing::kOneExpert, 9);
  std::vector<uint8_t> right;
  int32_t stopped = 0;
  for (const int64_t limit_us : {30'000'000, 100, 200, 300, 400, 500, 600, 800}) {
    cuda::CudaBackendOptions options;
    options.path = GetParam();
    options.common.layers = {spec};
    options.common.placement = std::make_shared<const Placement>(*Placement::Contiguous(1, 1));
    options.common.max_tokens_per_rank = 64;
    options.common.step_timeout = absl::Microseconds(limit_us);
    auto backend = cuda::MakeCudaBackend(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    const absl::Status loaded = testing::LoadLayers(absl::MakeConstSpan(&layer, 1),
                                                    *options.common.placement, (*backend)->sink());
    ASSERT_TRUE(loaded.ok()) << loaded;
    for (int i = 0; i < 20; ++i) {
      const auto answer = testing::RunStep(**backend, spec, batch);
      if (!answer.ok()) {
        EXPECT_FALSE(IsFatal(answer.status())) << answer.status();
        ++stopped;
        continue;
      }
      if (right.empty()) right = answer->bytes;
      EXPECT_EQ(FirstDifference(answer->bytes, right), -1) << limit_us << " us";
    }
  }
  // The plain kernels do not look at the stop word.
  if (GetParam() == cuda::KernelPath::kFused) {
    EXPECT_GT(stopped, 0);
  }
}

TEST_P(CudaBackendTest, AWrongDeviceAndTooManyTokensAreRefusedBeforeAnyLaunch) {
  cuda::CudaBackendOptions wrong_device = options_;
  wrong_device.common.devices = {64};
  EXPECT_TRUE(absl::IsInvalidArgument(cuda::MakeCudaBackend(wrong_device).status()));
  cuda::CudaBackendOptions huge = options_;
  for (LayerSpec& spec : huge.common.layers) {
    spec.hidden_size = spec.intermediate_size = 32768;
    spec.top_k = limits::kMaxTopK;
  }
  huge.common.max_tokens_per_rank = limits::kMaxTokensPerRank;
  const absl::Status status = cuda::MakeCudaBackend(huge).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_tokens_per_rank that fits is"));
}

}  // namespace
}  // namespace expertd
