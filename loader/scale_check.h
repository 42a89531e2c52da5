#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/types/span.h"
#include "config/model_spec.h"

namespace expertd {

// Non-zero MXFP4 blocks lie within 2^-100..2^60: what kernels rely on (their decode folds a
// constant into the scale), and no real checkpoint is outside. A zero block is exactly 0 whatever
// its scale.
inline constexpr uint8_t kMinUe8m0 = 127 - 100;
inline constexpr uint8_t kMaxUe8m0 = 127 + 60;

// Fast, one pass without branches: true if no block scale needs a closer look.
bool BlockScalesPlain(Recipe recipe, absl::Span<const uint8_t> scales);

// Exact: the first block scale that is refused, as a sentence without the tensor's name; nothing if
// all are good. codes [out, in/2], scales [out, in/group]; codes are looked at only where MXFP4
// scales are out of range and may be empty for NVFP4.
std::optional<std::string> FindBadBlockScale(Recipe recipe, const MatrixShape& shape,
                                             absl::Span<const uint8_t> codes,
                                             absl::Span<const uint8_t> scales);

// A second level must be finite and above 0.
std::optional<std::string> FindBadSecondLevel(float value);

}  // namespace expertd
