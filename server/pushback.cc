#include "server/pushback.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/types/optional.h"

namespace expertd {
namespace {

constexpr char kPayload[] = "expertd.v1/retry-pushback-ms";

}  // namespace

absl::Status WithPushback(absl::Status status, int64_t milliseconds) {
  status.SetPayload(kPayload, absl::Cord(std::to_string(milliseconds)));
  return status;
}

int64_t PushbackMs(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayload);
  int64_t milliseconds = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &milliseconds)) return 0;
  return milliseconds;
}

}  // namespace expertd
