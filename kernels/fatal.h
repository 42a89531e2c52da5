#pragma once

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace expertd {

// Marks a status after which this process cannot compute any more: a sticky device error, or a step
// that will not end. Every later step fails with the same status; the daemon answers what it holds
// with UNAVAILABLE and exits with exit_codes::kSoftware. Anything unmarked leaves the process
// usable.
inline constexpr char kFatalPayload[] = "expertd/fatal";

inline absl::Status MarkFatal(absl::Status status) {
  status.SetPayload(kFatalPayload, absl::Cord());
  return status;
}

inline bool IsFatal(const absl::Status& status) {
  return status.GetPayload(kFatalPayload).has_value();
}

}  // namespace expertd
