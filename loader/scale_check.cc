#include "loader/scale_check.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "config/check.h"

namespace expertd {
namespace {

constexpr uint8_t kUe8m0Nan = 255;
constexpr uint8_t kE4m3Magnitude = 0x7f;   // all ones: NaN
constexpr uint8_t kCodeMagnitudes = 0x77;  // of a byte's two E2M1 codes, without the signs

bool IsZeroBlock(absl::Span<const uint8_t> codes) {
  return std::all_of(codes.begin(), codes.end(),
                     [](uint8_t byte) { return (byte & kCodeMagnitudes) == 0; });
}

std::optional<std::string> CheckUe8m0(uint8_t scale, absl::Span<const uint8_t> codes) {
  if (scale == kUe8m0Nan) return "found NaN (byte 255), expected a power of two";
  if (scale >= kMinUe8m0 && scale <= kMaxUe8m0) return std::nullopt;
  if (IsZeroBlock(codes)) return std::nullopt;
  return absl::StrCat("found 2^", int{scale} - 127,
                      " for a block that is not zero, expected 2^-100 to 2^60");
}

}  // namespace

bool BlockScalesPlain(Recipe recipe, absl::Span<const uint8_t> scales) {
  if (recipe == Recipe::kNvfp4) {
    uint8_t largest = 0;
    for (const uint8_t scale : scales) {
      largest = std::max<uint8_t>(largest, scale & kE4m3Magnitude);
    }
    return largest < kE4m3Magnitude;
  }
  uint8_t smallest = 255, largest = 0;
  for (const uint8_t scale : scales) {
    smallest = std::min(smallest, scale);
    largest = std::max(largest, scale);
  }
  return scales.empty() || (smallest >= kMinUe8m0 && largest <= kMaxUe8m0);
}

std::optional<std::string> FindBadBlockScale(Recipe recipe, const MatrixShape& shape,
                                             absl::Span<const uint8_t> codes,
                                             absl::Span<const uint8_t> scales) {
  if (BlockScalesPlain(recipe, scales)) return std::nullopt;
  const auto blocks = static_cast<size_t>(shape.in / ScaleGroup(recipe));
  const auto block_bytes = static_cast<size_t>(ScaleGroup(recipe) / 2);
  EXPERTD_CHECK(recipe == Recipe::kNvfp4 || codes.size() == scales.size() * block_bytes);
  for (size_t i = 0; i < scales.size(); ++i) {
    std::optional<std::string> bad;
    if (recipe == Recipe::kMxfp4) {
      bad = CheckUe8m0(scales[i], codes.subspan(i * block_bytes, block_bytes));
    } else if ((scales[i] & kE4m3Magnitude) == kE4m3Magnitude) {
      bad = absl::StrCat("found NaN (byte ", scales[i], "), expected a number");
    }
    if (bad) return absl::StrCat("block scale [", i / blocks, ", ", i % blocks, "]: ", *bad);
  }
  return std::nullopt;
}

std::optional<std::string> FindBadSecondLevel(float value) {
  if (std::isfinite(value) && value > 0) return std::nullopt;
  return absl::StrCat("second-level scale: found ", value, ", expected a finite number above 0");
}

}  // namespace expertd
