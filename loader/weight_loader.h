#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "loader/checkpoint.h"
#include "loader/load_plan.h"

namespace expertd {

struct LoadProgress {
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
  absl::Duration elapsed;
};

struct LoadOptions {
  int32_t num_threads = 0;  // readers; 0 = one a core, at most 16
  absl::Time deadline = absl::InfiniteFuture();
  std::function<void(const LoadProgress&)>
      on_progress;                               // from reader threads, at most ten a second
  const std::atomic<bool>* cancelled = nullptr;  // checked between reads
};

// Runs the plan: parallel reads straight into the sink's memory, each block scale and second-level
// scale checked (NaN, range, sign), then sink.Finish(). Memory beside the sink's: a few KB a
// thread. DATA_LOSS if a file changed since Checkpoint::Open, INVALID_ARGUMENT naming tensor and
// file for a bad value, CANCELLED, DEADLINE_EXCEEDED.
absl::Status LoadWeights(const Checkpoint& checkpoint, const LoadPlan& plan, WeightSink& sink,
                         const LoadOptions& options = {});

}  // namespace expertd
