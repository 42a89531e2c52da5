#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/time/time.h"
#include "loader/weight_loader.h"

namespace expertd {

// "1.5 kB", "147.2 GB": decimal units.
std::string HumanBytes(int64_t bytes);

// "34 %, 50.1 GB of 147.2 GB, 3.10 GB/s, 31 s left"
std::string ProgressText(const LoadProgress& progress);

// Shows a load: a bar that redraws itself at a terminal, a line every few seconds elsewhere. Update
// may be given to LoadOptions::on_progress as it is: the loader never calls it twice at once.
class ProgressPrinter {
 public:
  // `out` stays open and the caller's.
  ProgressPrinter(std::FILE* out, bool is_terminal);
  ~ProgressPrinter();  // ends an open bar with a newline
  ProgressPrinter(const ProgressPrinter&) = delete;
  ProgressPrinter& operator=(const ProgressPrinter&) = delete;

  static bool IsTerminal(std::FILE* out);

  void Update(const LoadProgress& progress);

 private:
  std::FILE* const out_;
  const bool is_terminal_;
  bool bar_open_ = false;
  bool finished_ = false;
  absl::Duration last_line_ = -absl::InfiniteDuration();
};

}  // namespace expertd
