#include "loader/scale_check.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "config/check.h"

namespace expertd {
namespace {

constexpr size_t kPiece = 64;  // scales that are judged together
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

// marks[i] = 1 where the scale needs a closer look. Plain loops, which the compiler vectorises.
void MarkOdd(Recipe recipe, absl::Span<const uint8_t> piece, uint8_t* marks) {
  if (recipe == Recipe::kNvfp4) {
    for (size_t i = 0; i < piece.size(); ++i) {
      marks[i] = (piece[i] & kE4m3Magnitude) == kE4m3Magnitude;
    }
    return;
  }
  for (size_t i = 0; i < piece.size(); ++i) {
    marks[i] = static_cast<uint8_t>(piece[i] - kMinUe8m0) > kMaxUe8m0 - kMinUe8m0;
  }
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
  // Zero blocks with odd scales are scattered all over real files: eight marks at a time, and of
  // these only the set ones.
  for (size_t start = 0; start < scales.size(); start += kPiece) {
    alignas(kPiece) std::array<uint8_t, kPiece> marks = {};
    MarkOdd(recipe, scales.subspan(start, kPiece), marks.data());
    for (size_t at = 0; at < kPiece; at += sizeof(uint64_t)) {
      uint64_t word;
      std::memcpy(&word, &marks[at], sizeof(word));
      for (; word != 0; word &= word - 1) {
        const size_t i = start + at + static_cast<size_t>(std::countr_zero(word)) / 8;
        if (recipe == Recipe::kMxfp4 && scales[i] != kUe8m0Nan) {
          EXPERTD_CHECK((i + 1) * block_bytes <= codes.size());
          if (IsZeroBlock(codes.subspan(i * block_bytes, block_bytes))) continue;
        }
        return absl::StrCat("block scale [", i / blocks, ", ", i % blocks,
                            "]: ", Describe(recipe, scales[i]));
      }
    }
  }
  return std::nullopt;
}

std::optional<std::string> FindBadSecondLevel(float value) {
  if (std::isfinite(value) && value > 0) return std::nullopt;
  return absl::StrCat("second-level scale: found ", value, ", expected a finite number above 0");
}

}  // namespace expertd
