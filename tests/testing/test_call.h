#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "config/check.h"
#include "expertd/v1/expertd.pb.h"
#include "kernels/formats.h"
#include "server/request.h"
#include "server/validate.h"

namespace expertd {

// Layers 0 to 3, H 32, E 8, at most 16 tokens a request.
inline ServedModel TinyModel() {
  ServedModel model;
  model.name = "tiny";
  model.max_tokens = 16;
  for (int32_t layer = 0; layer < 4; ++layer) {
    model.layers.push_back({layer, 32, 32, 8, 2, Recipe::kMxfp4, 0});
  }
  return model;
}

// A request as numbers; `base` makes its values different from those of others.
inline v1::ForwardRequest NumbersRequest(int32_t layer, int32_t num_tokens, int32_t top_k,
                                         float base = 1) {
  v1::ForwardRequest request;
  request.set_layer(layer);
  request.set_num_tokens(num_tokens);
  request.set_hidden_size(32);
  request.set_top_k(top_k);
  for (int32_t i = 0; i < num_tokens * 32; ++i) {
    request.add_hidden_values(base + static_cast<float>(i));
  }
  for (int32_t i = 0; i < num_tokens * top_k; ++i) {
    request.add_expert_id_values(i % 8);
    request.add_routing_weight_values(0.25f * static_cast<float>(i % 3 + 1));
  }
  return request;
}

// A call with its request and what came back.
class TestCall {
 public:
  explicit TestCall(v1::ForwardRequest request, absl::Time deadline = absl::InfiniteFuture(),
                    const ServedModel& model = TinyModel())
      : request_(std::move(request)) {
    const absl::StatusOr<RequestView> view = Validate(request_, model);
    EXPERTD_CHECK(view.ok());
    call_ = std::make_shared<Call>(*view, deadline, [this](const Answer& answer) { Take(answer); });
  }

  const std::shared_ptr<Call>& call() const { return call_; }

  // The answer's status; DEADLINE_EXCEEDED "no answer" if none came in 20 s.
  absl::Status Wait() {
    std::unique_lock lock(mutex_);
    if (!answered_.wait_for(lock, std::chrono::seconds(20),
                            [this] { return status_.has_value(); })) {
      return absl::DeadlineExceededError("no answer");
    }
    return *status_;
  }
  bool done() {
    std::lock_guard lock(mutex_);
    return status_.has_value();
  }
  int answers() {
    std::lock_guard lock(mutex_);
    return answers_;
  }
  const std::vector<float>& output() const { return output_; }  // after Wait
  const CallTiming& timing() const { return timing_; }

  // What a FakeBackend answers to this request.
  std::vector<float> Expected() const {
    std::vector<float> expected;
    for (int32_t t = 0; t < request_.num_tokens(); ++t) {
      float factor = 0;
      for (int32_t k = 0; k < request_.top_k(); ++k) {
        const int32_t route = t * request_.top_k() + k;
        factor += request_.routing_weight_values(route) *
                  static_cast<float>(request_.expert_id_values(route) + 1);
      }
      for (int32_t h = 0; h < 32; ++h)
        expected.push_back(request_.hidden_values(t * 32 + h) * factor);
    }
    return expected;
  }

 private:
  void Take(const Answer& answer) {
    std::lock_guard lock(mutex_);
    ++answers_;
    for (const OutputRows& rows : answer.rows) {
      for (int64_t i = 0; i < rows.count * call_->view.hidden_size; ++i) {
        output_.push_back(call_->view.key.output_dtype == DType::kF32
                              ? static_cast<const float*>(rows.data)[i]
                              : Bf16ToFloat(static_cast<const uint16_t*>(rows.data)[i]));
      }
    }
    timing_ = answer.timing;
    status_ = answer.status;
    answered_.notify_all();
  }

  const v1::ForwardRequest request_;
  std::shared_ptr<Call> call_;
  std::mutex mutex_;
  std::condition_variable answered_;
  // Guarded by mutex_.
  std::optional<absl::Status> status_;
  int answers_ = 0;
  std::vector<float> output_;
  CallTiming timing_;
};

}  // namespace expertd
