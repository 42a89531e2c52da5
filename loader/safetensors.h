#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "loader/file.h"

namespace expertd {

// Element types of the safetensors format.
enum class TensorType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kU16,
  kI16,
  kF16,
  kBf16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
  kC64,
};

std::string_view TensorTypeName(TensorType type);  // as in the files: "F8_E8M0"
int TensorTypeBits(TensorType type);
std::optional<TensorType> ParseTensorType(std::string_view name);

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kU8;
  std::vector<uint64_t> shape;  // row-major; empty = a scalar
  uint64_t offset = 0;          // from the start of the file
  uint64_t bytes = 0;
};

std::string ShapeText(absl::Span<const uint64_t> shape);  // "[128, 64]"

// A file: 8 bytes n (little-endian), n bytes of JSON, then the tensors' bytes without a gap.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // by offset
  FileIdentity identity;            // of the file it was read from
};

// Bytes of the header, n, from the first 8 bytes of a file of `file_bytes`; refuses what is absurd,
// so that the caller may allocate.
absl::StatusOr<uint64_t> SafetensorsHeaderBytes(absl::Span<const uint8_t> first_bytes,
                                                uint64_t file_bytes);

// Pure. `bytes`: at least the first 8 + n of the file. Refuses whatever the format forbids:
// duplicate names, gaps, overlaps, sizes that are not shape x type, bytes behind the last tensor.
absl::StatusOr<std::vector<TensorInfo>> ParseSafetensorsHeader(absl::Span<const uint8_t> bytes,
                                                               uint64_t file_bytes);

// Reads the header, and no byte behind it.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const std::filesystem::path& path);

}  // namespace expertd
