#include "server/self_test.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/limits.h"
#include "kernels/formats.h"
#include "kernels/reference/reference.h"
#include "server/expert_reader.h"
#include "server/pushback.h"
#include "server/random_request.h"

namespace expertd {
namespace {

// BF16 activations against the double-precision evaluation.
constexpr double kTolerance = 0.005;

v1::ForwardRequest MakeInput(const LayerSpec& layer, int32_t num_tokens, uint64_t seed) {
  v1::LayerInfo info;
  info.set_layer(layer.layer);
  info.set_hidden_size(static_cast<int32_t>(layer.hidden_size));
  info.set_num_experts(layer.num_experts);
  info.set_top_k(layer.top_k);
  RandomRequestOptions options;
  options.tokens = num_tokens;
  options.seed = seed;
  v1::ForwardRequest input = MakeRandomRequest(info, options);
  input.set_output_dtype(v1::DTYPE_F32);  // no rounding of the answer hides in the error
  return input;
}

template <typename T>
std::vector<T> Row(const std::string& bytes, int64_t row, int64_t columns) {
  std::vector<T> values(columns);
  std::memcpy(values.data(), bytes.data() + row * columns * sizeof(T), columns * sizeof(T));
  return values;
}

// What the engine's thread hands back to the tester's.
struct Outcome {
  std::mutex mutex;
  std::condition_variable answered;
  bool done = false;
  absl::Status status;
  std::vector<float> output;
};

}  // namespace

SelfTester::SelfTester(const Checkpoint* checkpoint, const ServedModel* model, Engine* engine)
    : checkpoint_(checkpoint), model_(model), engine_(engine), thread_([this] { Run(); }) {}

SelfTester::~SelfTester() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

absl::Status SelfTester::Start(const v1::SelfTestRequest& request, absl::Time deadline,
                               std::shared_ptr<const std::atomic<bool>> cancelled, Done done) {
  if (model_->Find(request.layer()) == nullptr) {
    return absl::NotFoundError(absl::StrCat("layer: found ", request.layer(),
                                            ", expected one of the served layers ",
                                            model_->LayerList()));
  }
  if (request.num_tokens() < 0 || request.num_tokens() > limits::kSelfTestMaxTokens) {
    return absl::InvalidArgumentError(absl::StrCat("num_tokens: found ", request.num_tokens(),
                                                   ", expected 1 to ", limits::kSelfTestMaxTokens,
                                                   " or 0 for 1"));
  }
  std::lock_guard lock(mutex_);
  if (stopping_) return absl::UnavailableError("draining: the server is shutting down");
  if (busy_) {
    return WithPushback(absl::ResourceExhaustedError("another self test is running"),
                        limits::kRetryPushbackMs);
  }
  busy_ = true;
  waiting_ = std::make_unique<Job>(Job{request, deadline, std::move(cancelled), std::move(done)});
  wake_.notify_one();
  return absl::OkStatus();
}

void SelfTester::Run() {
  while (true) {
    std::unique_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || waiting_ != nullptr; });
      if (waiting_ == nullptr) return;
      job = std::move(waiting_);
    }
    absl::StatusOr<v1::SelfTestResponse> response = Test(*job);
    {
      std::lock_guard lock(mutex_);
      busy_ = false;
    }
    job->done(std::move(response));
  }
}

absl::Status SelfTester::CheckGoingOn(const Job& job) const {
  if (stopping_) return absl::UnavailableError("draining: the server is shutting down");
  if (job.cancelled->load()) return absl::CancelledError("cancelled");
  if (absl::Now() >= job.deadline)
    return absl::DeadlineExceededError("the deadline passed during the test");
  return absl::OkStatus();
}

absl::StatusOr<v1::SelfTestResponse> SelfTester::Test(const Job& job) {
  const LayerSpec& layer = *model_->Find(job.request.layer());
  const int32_t num_tokens = std::max(1, job.request.num_tokens());
  const v1::ForwardRequest input = MakeInput(layer, num_tokens, job.request.seed());
  const absl::StatusOr<RequestView> view = Validate(input, *model_);
  if (!view.ok()) return view.status();

  const absl::Time start = absl::Now();
  Outcome outcome;
  const int64_t hidden_size = layer.hidden_size;
  const auto call = std::make_shared<Call>(*view, job.deadline, [&](const Answer& answer) {
    std::lock_guard lock(outcome.mutex);
    outcome.status = answer.status;
    for (const OutputRows& rows : answer.rows) {
      const float* from = static_cast<const float*>(rows.data);
      outcome.output.insert(outcome.output.end(), from, from + rows.count * hidden_size);
    }
    outcome.done = true;
    outcome.answered.notify_one();
  });
  engine_->Submit(call);
  {
    // Every call is answered: by its step, its deadline, or the engine's end.
    std::unique_lock lock(outcome.mutex);
    outcome.answered.wait(lock, [&] { return outcome.done; });
  }
  if (!outcome.status.ok()) return outcome.status;
  const absl::Time forward_end = absl::Now();

  const absl::StatusOr<std::vector<double>> expected = Reference(job, layer, input);
  if (!expected.ok()) return expected.status();
  v1::SelfTestResponse response;
  response.set_layer(layer.layer);
  response.set_num_tokens(num_tokens);
  response.set_rel_l2_error(reference::RelL2(outcome.output, *expected));
  response.set_tolerance(kTolerance);
  response.set_passed(response.rel_l2_error() < kTolerance);
  response.set_forward_us(absl::ToInt64Microseconds(forward_end - start));
  response.set_reference_us(absl::ToInt64Microseconds(absl::Now() - forward_end));
  return response;
}

absl::StatusOr<std::vector<double>> SelfTester::Reference(const Job& job, const LayerSpec& layer,
                                                          const v1::ForwardRequest& input) {
  std::vector<double> expected;
  for (int32_t token = 0; token < input.num_tokens(); ++token) {
    const auto ids = Row<int32_t>(input.expert_ids(), token, input.top_k());
    const auto weights = Row<float>(input.routing_weights(), token, input.top_k());
    std::vector<double> hidden;
    for (const uint16_t bits : Row<uint16_t>(input.hidden_states(), token, layer.hidden_size)) {
      hidden.push_back(Bf16ToFloat(bits));
    }
    // One expert at a time: they are large, and a drain need not wait longer than for one.
    std::vector<double> sum(layer.hidden_size);
    std::vector<reference::ExpertView> views(layer.num_experts);
    for (size_t k = 0; k < ids.size(); ++k) {
      const absl::Status going_on = CheckGoingOn(job);
      if (!going_on.ok()) return going_on;
      const absl::StatusOr<FileExpert> expert = FileExpert::Read(*checkpoint_, layer, ids[k]);
      if (!expert.ok()) return expert.status();
      views[ids[k]] = expert->View();
      const std::vector<double> row =
          reference::Forward(layer, views, hidden, {ids[k]}, {weights[k]}, 1);
      std::transform(row.begin(), row.end(), sum.begin(), sum.begin(), std::plus<double>());
    }
    expected.insert(expected.end(), sum.begin(), sum.end());
  }
  return expected;
}

}  // namespace expertd
