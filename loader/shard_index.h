#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace expertd {

// Which shard holds which tensor, as model.safetensors.index.json says.
struct ShardIndex {
  struct Entry {
    std::string tensor;
    int32_t file = 0;  // index into files
  };

  std::vector<std::string> files;  // plain names inside the directory, sorted, each once
  std::vector<Entry> entries;      // sorted by tensor name, each once

  // -1 if the tensor is not listed; otherwise the index into entries.
  int64_t Find(std::string_view tensor) const;
};

// Pure. Refuses duplicate tensors, names that are not a plain file name ending in .safetensors (so
// that no path leads out of the directory) and anything that is not the documented structure.
absl::StatusOr<ShardIndex> ParseShardIndex(std::string_view json);

}  // namespace expertd
