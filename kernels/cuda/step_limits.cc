#include "kernels/cuda/step_limits.h"

#include <algorithm>

#include "config/limits.h"

namespace expertd::cuda {

absl::Duration WaitLimit(const WaitQuestion& question) {
  absl::Duration limit = absl::Milliseconds(limits::kCudaWaitMs);
  if (question.num_ranks > 1) {
    // Three matrices, a multiplication and an addition for each weight.
    const double operations =
        6.0 * static_cast<double>(question.routes) * question.hidden * question.intermediate;
    limit = std::min(limit, absl::Milliseconds(limits::kCudaPeerWaitMs) +
                                absl::Seconds(operations / limits::kCudaSlowestFlops));
  }
  return std::min(limit, question.step_timeout / 2);
}

}  // namespace expertd::cuda
