#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "kernels/backend.h"
#include "server/app.h"

namespace expertd {

// Holds back or fails the steps of a real backend, and its creation. Shared with the test.
class BackendGate {
 public:
  void HoldLoading() {
    std::lock_guard lock(mutex_);
    loading_held_ = true;
  }
  void HoldSteps() {
    std::lock_guard lock(mutex_);
    steps_held_ = true;
  }
  void Release() {
    std::deque<std::pair<Backend::Done, StepResult>> ended;
    {
      std::lock_guard lock(mutex_);
      loading_held_ = steps_held_ = false;
      ended.swap(held_);
    }
    changed_.notify_all();
    for (auto& [done, result] : ended) done(std::move(result));
  }
  void FailNext(absl::Status status) {
    std::lock_guard lock(mutex_);
    failure_ = std::move(status);
  }
  bool WaitForEnded(int steps) {  // computed, perhaps held
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return ended_ >= steps; });
  }

  // What the decorator calls.
  void WaitUntilLoadable() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !loading_held_; });
  }
  void Ended(Backend::Done done, StepResult result) {
    {
      std::lock_guard lock(mutex_);
      if (!failure_.ok()) result.status = std::exchange(failure_, absl::OkStatus());
      ++ended_;
      changed_.notify_all();
      if (steps_held_) {
        held_.emplace_back(std::move(done), std::move(result));
        return;
      }
    }
    done(std::move(result));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool loading_held_ = false;
  bool steps_held_ = false;
  int ended_ = 0;
  absl::Status failure_;
  std::deque<std::pair<Backend::Done, StepResult>> held_;
};

// A backend behind a gate. An abort opens it.
class HeldBackend final : public Backend {
 public:
  HeldBackend(std::unique_ptr<Backend> backend, std::shared_ptr<BackendGate> gate)
      : gate_(std::move(gate)), backend_(std::move(backend)) {}
  ~HeldBackend() override { gate_->Release(); }

  const BackendInfo& info() const override { return backend_->info(); }
  WeightSink& sink() override { return backend_->sink(); }
  absl::StatusOr<StepMemory*> AcquireStep(absl::Time deadline) override {
    return backend_->AcquireStep(deadline);
  }
  void ReleaseStep(StepMemory* memory) override { backend_->ReleaseStep(memory); }
  absl::Status Submit(const MoeStep& step, Done done) override {
    return backend_->Submit(step, [gate = gate_, done = std::move(done)](StepResult result) {
      gate->Ended(done, std::move(result));
    });
  }
  void AbortSteps(const absl::Status& reason) override {
    gate_->FailNext(reason);
    backend_->AbortSteps(reason);
    gate_->Release();
  }

 private:
  const std::shared_ptr<BackendGate> gate_;
  std::unique_ptr<Backend> backend_;
};

inline BackendFactory Gated(const std::shared_ptr<BackendGate>& gate) {
  return [gate](const BackendOptions& options) -> absl::StatusOr<std::unique_ptr<Backend>> {
    gate->WaitUntilLoadable();
    absl::StatusOr<std::unique_ptr<Backend>> backend = MakeCpuBackend(options);
    if (!backend.ok()) return backend;
    return std::make_unique<HeldBackend>(*std::move(backend), gate);
  };
}

}  // namespace expertd
