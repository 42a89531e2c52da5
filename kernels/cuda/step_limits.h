#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace expertd::cuda {

// What the limit of a wait inside the kernel follows from.
struct WaitQuestion {
  int32_t num_ranks = 1;
  int64_t routes = 0;           // of all ranks that can meet on one of them
  int64_t hidden = 0;           // H
  int64_t intermediate = 0;     // I
  absl::Duration step_timeout;  // then the host tells the kernel to stop
};

// At most half of the step's own limit, so that the kernel speaks first and can say who waited for
// whom. Beside that, one rank waits for its own CTAs only: limits::kCudaWaitMs. Several ranks find
// a lost peer within limits::kCudaPeerWaitMs, and the time that the step's arithmetic may take if
// all of it meets on one rank.
absl::Duration WaitLimit(const WaitQuestion& question);

}  // namespace expertd::cuda
