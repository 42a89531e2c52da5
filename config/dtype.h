#pragma once

#include <cstdint>
#include <string_view>

namespace expertd {

// Element type of hidden states and outputs, little-endian.
enum class DType { kBf16, kF32 };

constexpr int64_t DTypeBytes(DType dtype) { return dtype == DType::kBf16 ? 2 : 4; }
constexpr std::string_view DTypeName(DType dtype) { return dtype == DType::kBf16 ? "bf16" : "f32"; }

}  // namespace expertd
