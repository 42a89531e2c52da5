#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace expertd {

// Everything that is wrong with a checkpoint, one sentence a line. Keeps the first kKept and counts
// the rest, so that a file with a million bad tensors is still an answer a person can read.
class Problems {
 public:
  static constexpr int64_t kKept = 50;

  void Add(std::string line) {
    if (static_cast<int64_t>(lines_.size()) < kKept) lines_.push_back(std::move(line));
    ++count_;
  }

  // Lines that were found and dropped elsewhere.
  void AddUntold(int64_t count) { count_ += count; }

  bool empty() const { return count_ == 0; }
  int64_t count() const { return count_; }
  const std::vector<std::string>& lines() const { return lines_; }

  // OK if there is none.
  absl::Status ToStatus(const std::string& what) const {
    if (empty()) return absl::OkStatus();
    std::string text = absl::StrCat(what, ": ", count_, count_ == 1 ? " problem" : " problems");
    for (const std::string& line : lines_) absl::StrAppend(&text, "\n  ", line);
    const int64_t untold = count_ - static_cast<int64_t>(lines_.size());
    if (untold > 0) absl::StrAppend(&text, "\n  and ", untold, " more");
    return absl::InvalidArgumentError(text);
  }

 private:
  int64_t count_ = 0;
  std::vector<std::string> lines_;
};

}  // namespace expertd
