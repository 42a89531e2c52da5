// Any bytes as a safetensors file: whatever is accepted must be inside the file and without a gap.

#include <cstddef>
#include <cstdint>

#include "config/check.h"
#include "loader/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using expertd::TensorInfo;
  const absl::Span<const uint8_t> bytes(data, size);
  const auto tensors = expertd::ParseSafetensorsHeader(bytes, size);
  if (!tensors.ok()) {
    EXPERTD_CHECK(!tensors.status().message().empty());
    return 0;
  }
  const auto header_bytes = expertd::SafetensorsHeaderBytes(bytes, size);
  EXPERTD_CHECK(header_bytes.ok());
  uint64_t next = 8 + *header_bytes;
  for (const TensorInfo& tensor : *tensors) {
    EXPERTD_CHECK(tensor.offset == next);
    next += tensor.bytes;
    EXPERTD_CHECK(next <= size);
  }
  EXPERTD_CHECK(next == size);
  return 0;
}
