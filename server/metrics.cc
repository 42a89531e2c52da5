#include "server/metrics.h"

#include "absl/strings/str_cat.h"

namespace expertd {

void Metrics::RequestAccepted(int64_t rows) {
  Add(accepted_, 1);
  Add(accepted_rows_, rows);
}

void Metrics::RequestAnswered(absl::StatusCode code) {
  const int index = static_cast<int>(code);
  if (index >= 0 && index < kNumCodes) Add(answered_[index], 1);
}

void Metrics::StepDone(int64_t rows) {
  Add(steps_, 1);
  Add(step_rows_, rows);
}

uint64_t Metrics::answered(absl::StatusCode code) const {
  return answered_[static_cast<int>(code)].load(std::memory_order_relaxed);
}

std::string Metrics::Summary() const {
  std::string text = absl::StrCat("accepted ", accepted(), " requests of ", accepted_rows(),
                                  " rows; ", steps(), " steps of ", step_rows(), " rows, ",
                                  steps_failed(), " failed; cancelled in queue ",
                                  cancelled_in_queue(), ", expired in queue ", expired_in_queue());
  for (int i = 0; i < kNumCodes; ++i) {
    const auto code = static_cast<absl::StatusCode>(i);
    if (answered(code) > 0) {
      absl::StrAppend(&text, "; ", absl::StatusCodeToString(code), " ", answered(code));
    }
  }
  return text;
}

}  // namespace expertd
