#pragma once

#include <string>

#include "absl/status/status.h"

// The client's own way to carry a retry pushback inside a status; users call RetryPushback
// (client.h).
namespace expertd {

// `pushback_ms`: the trailer's text, a negative or unreadable number means: do not retry.
void SetRetryPushback(const std::string& pushback_ms, absl::Status* status);

}  // namespace expertd
