#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace expertd {

// Attaches the advice to come back after `milliseconds`; it travels as grpc-retry-pushback-ms.
absl::Status WithPushback(absl::Status status, int64_t milliseconds);

// The advice of a status, 0 if it has none.
int64_t PushbackMs(const absl::Status& status);

}  // namespace expertd
