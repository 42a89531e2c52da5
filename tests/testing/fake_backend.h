#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "config/check.h"
#include "config/limits.h"
#include "kernels/backend.h"
#include "kernels/fatal.h"
#include "kernels/formats.h"

namespace expertd {

// What a FakeBackend was asked to run.
struct RecordedStep {
  uint64_t generation = 0;
  uint64_t step = 0;
  int32_t layer = 0;
  int32_t top_k = 0;
  DType input_dtype = DType::kBf16;
  DType output_dtype = DType::kBf16;
  std::vector<std::vector<int32_t>> ids;             // [ranks][T * K]
  std::vector<std::vector<float>> weights;           // [ranks][T * K]
  std::vector<std::vector<int32_t>> row_in_request;  // [ranks][T]

  int64_t rows() const {
    int64_t sum = 0;
    for (const auto& rank : row_in_request) sum += static_cast<int64_t>(rank.size());
    return sum;
  }
};

// The strings of a FakeBackend; shared with the test, which may outlive the backend.
class FakeBackendControl {
 public:
  void Hold() {  // steps are taken and do not end
    std::lock_guard lock(mutex);
    held = true;
  }
  void Release() {
    std::lock_guard lock(mutex);
    held = false;
    changed.notify_all();
  }
  void FailNext(absl::Status status) {  // the next step to end
    std::lock_guard lock(mutex);
    next_failure = std::move(status);
  }
  void RefuseNext(absl::Status status) {  // the next Submit
    std::lock_guard lock(mutex);
    next_refusal = std::move(status);
  }
  bool WaitForSubmitted(size_t count) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(20), [&] { return steps.size() >= count; });
  }
  std::vector<RecordedStep> Steps() {
    std::lock_guard lock(mutex);
    return steps;
  }

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  bool held = false;
  absl::Status next_failure;
  absl::Status next_refusal;
  std::vector<RecordedStep> steps;  // submitted
  int64_t memories_out = 0;
};

// A backend without weights: out[t, h] = hidden[t, h] * sum over k of weight * (id + 1), masked ids
// skipped. Ends steps on a thread of its own.
class FakeBackend final : public Backend {
 public:
  FakeBackend(std::shared_ptr<FakeBackendControl> control, int32_t num_ranks,
              int32_t max_tokens_per_rank, int64_t hidden_size)
      : control_(std::move(control)), hidden_size_(hidden_size) {
    info_.name = "fake";
    info_.num_ranks = num_ranks;
    info_.max_tokens_per_rank = max_tokens_per_rank;
    for (Memory& memory : memories_) Allocate(memory);
    worker_ = std::thread([this] { Run(); });
  }

  ~FakeBackend() override {
    {
      std::lock_guard lock(control_->mutex);
      ending_ = true;
      control_->held = false;
      control_->changed.notify_all();
    }
    worker_.join();
  }

  const BackendInfo& info() const override { return info_; }
  WeightSink& sink() override { std::abort(); }  // it has no weights

  absl::StatusOr<StepMemory*> AcquireStep(absl::Time /*deadline*/) override {
    std::lock_guard lock(control_->mutex);
    for (Memory& memory : memories_) {
      if (std::exchange(memory.in_use, true)) continue;
      ++control_->memories_out;
      return &memory.views;
    }
    return absl::ResourceExhaustedError("every step memory is in use");
  }

  void ReleaseStep(StepMemory* memory) override {
    std::lock_guard lock(control_->mutex);
    for (Memory& candidate : memories_) {
      if (&candidate.views == memory) {
        EXPERTD_CHECK(std::exchange(candidate.in_use, false));
        --control_->memories_out;
      }
    }
  }

  absl::Status Submit(const MoeStep& step, Done done) override {
    std::lock_guard lock(control_->mutex);
    if (!abort_reason_.ok()) return abort_reason_;
    const absl::Status refusal = std::exchange(control_->next_refusal, absl::OkStatus());
    if (!refusal.ok()) return refusal;
    EXPERTD_CHECK(pending_.size() < limits::kStepsInFlight);
    control_->steps.push_back(Record(step));
    pending_.emplace_back(step, std::move(done));
    control_->changed.notify_all();
    return absl::OkStatus();
  }

  void AbortSteps(const absl::Status& reason) override {
    std::lock_guard lock(control_->mutex);
    abort_reason_ = reason;
    control_->changed.notify_all();
  }

 private:
  struct Memory {
    StepMemory views;
    std::vector<std::vector<float>> hidden, weights, output;
    std::vector<std::vector<int32_t>> ids, rows;
    bool in_use = false;
  };

  void Allocate(Memory& memory) {
    const size_t rows = info_.max_tokens_per_rank;
    for (int32_t r = 0; r < info_.num_ranks; ++r) {
      RankBatch& rank = memory.views.ranks.emplace_back();
      rank.hidden = memory.hidden.emplace_back(rows * hidden_size_).data();
      rank.ids = memory.ids.emplace_back(rows * limits::kMaxTopK).data();
      rank.weights = memory.weights.emplace_back(rows * limits::kMaxTopK).data();
      rank.row_in_request = memory.rows.emplace_back(rows).data();
      rank.output = memory.output.emplace_back(rows * hidden_size_).data();
    }
  }

  static RecordedStep Record(const MoeStep& step) {
    RecordedStep record{step.generation,   step.step, step.layer, step.top_k, step.input_dtype,
                        step.output_dtype, {},        {},         {}};
    for (const RankBatch& rank : step.ranks) {
      const int64_t routes = int64_t{rank.num_tokens} * step.top_k;
      record.ids.emplace_back(rank.ids, rank.ids + routes);
      record.weights.emplace_back(rank.weights, rank.weights + routes);
      record.row_in_request.emplace_back(rank.row_in_request,
                                         rank.row_in_request + rank.num_tokens);
    }
    return record;
  }

  void Compute(const MoeStep& step) const {
    for (const RankBatch& rank : step.ranks) {
      for (int64_t t = 0; t < rank.num_tokens; ++t) {
        float factor = 0;
        for (int32_t k = 0; k < step.top_k; ++k) {
          const int64_t route = t * step.top_k + k;
          if (rank.ids[route] >= 0)
            factor += rank.weights[route] * static_cast<float>(rank.ids[route] + 1);
        }
        for (int64_t i = t * hidden_size_; i < (t + 1) * hidden_size_; ++i) {
          const float in = step.input_dtype == DType::kF32
                               ? static_cast<const float*>(rank.hidden)[i]
                               : Bf16ToFloat(static_cast<const uint16_t*>(rank.hidden)[i]);
          if (step.output_dtype == DType::kF32) {
            static_cast<float*>(rank.output)[i] = in * factor;
          } else {
            static_cast<uint16_t*>(rank.output)[i] = FloatToBf16(in * factor);
          }
        }
      }
    }
  }

  void Run() {
    std::unique_lock lock(control_->mutex);
    while (true) {
      control_->changed.wait(lock, [this] {
        return (!pending_.empty() && (!control_->held || !abort_reason_.ok())) ||
               (ending_ && pending_.empty());
      });
      if (pending_.empty()) return;
      auto [step, done] = std::move(pending_.front());
      StepResult result;
      result.status = abort_reason_;
      if (result.status.ok())
        result.status = std::exchange(control_->next_failure, absl::OkStatus());
      if (IsFatal(result.status)) abort_reason_ = result.status;
      result.timing = {11, 22, 33};
      lock.unlock();
      if (result.status.ok()) Compute(step);
      lock.lock();
      pending_.pop_front();
      lock.unlock();
      done(std::move(result));
      lock.lock();
    }
  }

  const std::shared_ptr<FakeBackendControl> control_;
  const int64_t hidden_size_;
  BackendInfo info_;
  Memory memories_[limits::kStepMemories];
  std::thread worker_;
  // Guarded by control_->mutex.
  std::deque<std::pair<MoeStep, Done>> pending_;
  absl::Status abort_reason_;
  bool ending_ = false;
};

}  // namespace expertd
