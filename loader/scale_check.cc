#include "loader/scale_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "config/check.h"

namespace expertd {
namespace {

constexpr size_t kPiece = 16;  // scales that one vector instruction can judge
constexpr uint8_t kUe8m0Nan = 255;
constexpr uint8_t kE4m3Magnitude = 0x7f;                  // all ones: NaN
constexpr uint64_t kCodeMagnitudes = 0x7777777777777777;  // E2M1 codes without the signs

// 16 bytes: the codes of one MXFP4 block.
bool IsZeroBlock(absl::Span<const uint8_t> codes) {
  uint64_t words[2];
  EXPERTD_CHECK(codes.size() == sizeof(words));
  std::memcpy(words, codes.data(), sizeof(words));
  return ((words[0] | words[1]) & kCodeMagnitudes) == 0;
}

bool IsOdd(Recipe recipe, uint8_t scale) {
  return recipe == Recipe::kNvfp4 ? (scale & kE4m3Magnitude) == kE4m3Magnitude
                                  : scale < kMinUe8m0 || scale > kMaxUe8m0;
}

std::string Describe(Recipe recipe, uint8_t scale) {
  if (recipe == Recipe::kNvfp4)
    return absl::StrCat("found NaN (byte ", scale, "), expected a number");
  if (scale == kUe8m0Nan) return "found NaN (byte 255), expected a power of two";
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
  const auto blocks = static_cast<size_t>(shape.in / ScaleGroup(recipe));
  const auto block_bytes = static_cast<size_t>(ScaleGroup(recipe) / 2);
  // Zero blocks with odd scales are scattered all over real files: piece by piece, so that only the
  // neighbours of one are looked at one by one.
  for (size_t start = 0; start < scales.size(); start += kPiece) {
    const absl::Span<const uint8_t> piece = scales.subspan(start, kPiece);
    if (BlockScalesPlain(recipe, piece)) continue;
    EXPERTD_CHECK(recipe == Recipe::kNvfp4 || codes.size() == scales.size() * block_bytes);
    for (size_t i = start; i < start + piece.size(); ++i) {
      if (!IsOdd(recipe, scales[i])) continue;
      if (recipe == Recipe::kMxfp4 && scales[i] != kUe8m0Nan &&
          IsZeroBlock(codes.subspan(i * block_bytes, block_bytes))) {
        continue;
      }
      return absl::StrCat("block scale [", i / blocks, ", ", i % blocks,
                          "]: ", Describe(recipe, scales[i]));
    }
  }
  return std::nullopt;
}

std::optional<std::string> FindBadSecondLevel(float value) {
  if (std::isfinite(value) && value > 0) return std::nullopt;
  return absl::StrCat("second-level scale: found ", value, ", expected a finite number above 0");
}

}  // namespace expertd
