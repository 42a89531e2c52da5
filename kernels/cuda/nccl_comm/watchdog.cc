#include "kernels/cuda/nccl_comm/watchdog.h"

#include <condition_variable>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

// Shared by the thread and the one who waits; whoever leaves last frees it.
struct Outcome {
  std::mutex mutex;
  std::condition_variable ended;
  std::optional<absl::Status> status;  // guarded by mutex
};

}  // namespace

void StepName::Set(std::string name) {
  const std::lock_guard lock(mutex_);
  name_ = std::move(name);
}

std::string StepName::Get() const {
  const std::lock_guard lock(mutex_);
  return name_;
}

absl::Status RunWithin(absl::Duration limit, const std::string& who,
                       std::shared_ptr<const StepName> step, std::function<absl::Status()> work) {
  auto outcome = std::make_shared<Outcome>();
  std::thread thread([outcome, work = std::move(work)]() mutable {
    absl::Status status = work();
    work = nullptr;  // what it owns is released before anyone learns that it ended
    const std::lock_guard lock(outcome->mutex);
    outcome->status = std::move(status);
    outcome->ended.notify_all();
  });
  std::unique_lock lock(outcome->mutex);
  const bool ended = outcome->ended.wait_for(lock, absl::ToChronoNanoseconds(limit),
                                             [&] { return outcome->status.has_value(); });
  if (ended) {
    absl::Status status = *std::move(outcome->status);
    lock.unlock();
    thread.join();
    return status;
  }
  thread.detach();
  return MarkFatal(absl::DeadlineExceededError(
      absl::StrCat(who, ": ", step->Get(), ": a call did not return within ",
                   absl::FormatDuration(limit), "; its thread is given up")));
}

}  // namespace expertd::cuda
