#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace expertd::cpu {

// What this process may hold at most: the machine's memory, or less where a control group says so.
struct MemoryLimit {
  int64_t bytes = 0;   // INT64_MAX if the system does not tell
  std::string source;  // "of the machine", "of the control group FILE"
};

// Reads /proc/meminfo and the limits of the process's control groups (v1 and v2) from the innermost
// outwards. `root`: where these paths start; another one for tests.
MemoryLimit ReadMemoryLimit(const std::filesystem::path& root = "/");

}  // namespace expertd::cpu
