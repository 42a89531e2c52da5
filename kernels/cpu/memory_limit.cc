#include "kernels/cpu/memory_limit.h"

#include <fstream>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"

namespace expertd::cpu {
namespace {

namespace fs = std::filesystem;

// The number at the start of a file; nothing if there is none ("max", no such file).
std::optional<int64_t> ReadNumber(const fs::path& file) {
  std::ifstream in(file);
  int64_t number = 0;
  if (!(in >> number)) return std::nullopt;
  return number;
}

int64_t MachineBytes(const fs::path& root) {
  std::ifstream in(root / "proc/meminfo");
  std::string word;
  int64_t kilobytes = 0;
  while (in >> word) {
    if (word == "MemTotal:" && in >> kilobytes) return kilobytes * 1024;
  }
  return std::numeric_limits<int64_t>::max();
}

// `group`: a path within `mount`, which may not be visible from inside a container; then the mount
// itself is the container's own group.
void Tighten(const fs::path& mount, const std::string& group, const char* file,
             MemoryLimit* limit) {
  fs::path inner = fs::path(group).relative_path();
  for (;;) {
    const fs::path path = mount / inner / file;
    const std::optional<int64_t> bytes = ReadNumber(path);
    if (bytes && *bytes < limit->bytes) {
      *limit = {*bytes, absl::StrCat("of the control group ", path.string())};
    }
    if (inner.empty()) return;
    inner = inner.parent_path();
  }
}

}  // namespace

MemoryLimit ReadMemoryLimit(const fs::path& root) {
  MemoryLimit limit = {MachineBytes(root), "of the machine"};
  const fs::path mount = root / "sys/fs/cgroup";
  // Lines "number:controllers:path"; version 2 has number 0 and names no controllers.
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) Tighten(mount, group, "memory.max", &limit);
    if (absl::StrCat(",", controllers, ",").find(",memory,") != std::string::npos) {
      Tighten(mount / "memory", group, "memory.limit_in_bytes", &limit);
    }
  }
  return limit;
}

}  // namespace expertd::cpu
