#include "loader/link_rules.h"

#include <system_error>

#include "absl/strings/str_cat.h"

namespace expertd {
namespace {

namespace fs = std::filesystem;

// Both canonical.
bool IsInside(const fs::path& path, const fs::path& dir) {
  auto p = path.begin();
  for (auto d = dir.begin(); d != dir.end(); ++d, ++p) {
    if (p == path.end() || *p != *d) return false;
  }
  return p != path.end();
}

}  // namespace

fs::path HuggingFaceRepository(const fs::path& dir) {
  std::error_code error;
  const fs::path real = fs::canonical(dir, error);
  if (error || real.parent_path().filename() != "snapshots") return {};
  return real.parent_path().parent_path();
}

absl::Status CheckFileLink(const fs::path& dir, const std::string& name, bool allow_symlinks) {
  const fs::path path = dir / name;
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status)) {
    return absl::NotFoundError(absl::StrCat(name, ": missing, expected a file in ", dir.string()));
  }
  if (!fs::is_symlink(status)) return absl::OkStatus();

  const fs::path target = fs::canonical(path, error);
  if (error) {
    std::error_code ignored;
    return absl::NotFoundError(absl::StrCat(name, ": missing, found a link to ",
                                            fs::read_symlink(path, ignored).string(),
                                            ", which does not exist"));
  }
  const fs::path real_dir = fs::canonical(dir, error);
  if (allow_symlinks || (!error && IsInside(target, real_dir))) return absl::OkStatus();
  const fs::path repository = HuggingFaceRepository(dir);
  if (!repository.empty() && IsInside(target, repository / "blobs")) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, ": found a link to ", target.string(),
      ", expected a file inside the directory or in the same Hugging Face repository's blobs "
      "(--allow-symlinks permits it)"));
}

}  // namespace expertd
