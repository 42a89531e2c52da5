#include "loader/progress.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace expertd {
namespace {

constexpr absl::Duration kLineInterval = absl::Seconds(5);
constexpr int kBarWidth = 30;
constexpr char kEraseToEndOfLine[] = "\x1b[K";

double Share(const LoadProgress& progress) {
  if (progress.bytes_total <= 0) return 1;
  return std::min(
      1.0, static_cast<double>(progress.bytes_done) / static_cast<double>(progress.bytes_total));
}

std::string Bar(double share) {
  const int full = static_cast<int>(share * kBarWidth);
  return absl::StrCat("[", std::string(static_cast<size_t>(full), '#'),
                      std::string(static_cast<size_t>(kBarWidth - full), '.'), "]");
}

}  // namespace

std::string HumanBytes(int64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 999.95 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%d B", bytes)
                   : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string ProgressText(const LoadProgress& progress) {
  const double share = Share(progress);
  const double seconds = absl::ToDoubleSeconds(progress.elapsed);
  const double rate = seconds > 0 ? static_cast<double>(progress.bytes_done) / seconds : 0;
  std::string text = absl::StrFormat("%3d %%, %s of %s, %.2f GB/s", static_cast<int>(share * 100),
                                     HumanBytes(progress.bytes_done),
                                     HumanBytes(progress.bytes_total), rate / 1e9);
  if (share >= 1) {
    absl::StrAppendFormat(&text, ", %.1f s", seconds);
  } else if (rate > 0) {
    const double left = static_cast<double>(progress.bytes_total - progress.bytes_done) / rate;
    absl::StrAppendFormat(&text, ", %.0f s left", std::ceil(left));
  }
  return text;
}

ProgressPrinter::ProgressPrinter(std::FILE* out, bool is_terminal)
    : out_(out), is_terminal_(is_terminal) {}

ProgressPrinter::~ProgressPrinter() {
  if (bar_open_) std::fputc('\n', out_);
}

bool ProgressPrinter::IsTerminal(std::FILE* out) { return ::isatty(::fileno(out)) == 1; }

void ProgressPrinter::Update(const LoadProgress& progress) {
  if (finished_) return;
  finished_ = progress.bytes_done >= progress.bytes_total;
  if (is_terminal_) {
    std::fprintf(out_, "\rloading %s %s%s", Bar(Share(progress)).c_str(),
                 ProgressText(progress).c_str(), kEraseToEndOfLine);
    if (finished_) std::fputc('\n', out_);
    bar_open_ = !finished_;
  } else if (finished_ || progress.elapsed - last_line_ >= kLineInterval) {
    std::fprintf(out_, "loading: %s\n", ProgressText(progress).c_str());
    last_line_ = progress.elapsed;
  }
  std::fflush(out_);
}

}  // namespace expertd
