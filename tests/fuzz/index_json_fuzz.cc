// Any bytes as model.safetensors.index.json: whatever is accepted names plain files, each tensor
// once.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "config/check.h"
#include "loader/shard_index.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto index =
      expertd::ParseShardIndex(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!index.ok()) {
    EXPERTD_CHECK(!index.status().message().empty());
    return 0;
  }
  for (const std::string& file : index->files) {
    EXPERTD_CHECK(file.find('/') == std::string::npos && file.find('\\') == std::string::npos);
    EXPERTD_CHECK(file != "." && file != ".." && file.ends_with(".safetensors"));
  }
  for (size_t i = 0; i < index->entries.size(); ++i) {
    const auto& entry = index->entries[i];
    EXPERTD_CHECK(entry.file >= 0 && static_cast<size_t>(entry.file) < index->files.size());
    EXPERTD_CHECK(index->Find(entry.tensor) == static_cast<int64_t>(i));
  }
  return 0;
}
