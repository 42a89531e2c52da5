#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace expertd::cuda {

// What a thread is doing, for whoever waits for it. Thread-safe.
class StepName {
 public:
  void Set(std::string name);
  std::string Get() const;

 private:
  mutable std::mutex mutex_;
  std::string name_ = "start";  // guarded by mutex_
};

// Runs `work` on a thread of its own and waits for it at most `limit`. If it ended, its status is
// returned. Otherwise the thread is given up: it runs on, so `work` must own all that it touches,
// and the status is DEADLINE_EXCEEDED, names `who` and the step, and is marked fatal
// (kernels/fatal.h), for nothing that the thread uses can be freed any more.
absl::Status RunWithin(absl::Duration limit, const std::string& who,
                       std::shared_ptr<const StepName> step, std::function<absl::Status()> work);

}  // namespace expertd::cuda
