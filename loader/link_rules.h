#pragma once

#include <filesystem>
#include <string>

#include "absl/status/status.h"

namespace expertd {

// May `dir / name` be read? A link may point inside the directory or, from a Hugging Face cache's
// snapshots/REV, into the same repository's blobs/. Any other link needs `allow_symlinks`.
// NOT_FOUND if there is no such file or the link leads nowhere. `name` is a plain file name.
absl::Status CheckFileLink(const std::filesystem::path& dir, const std::string& name,
                           bool allow_symlinks);

// The repository's folder (models--ORG--NAME) if `dir` is .../snapshots/REV of a Hugging Face
// cache, otherwise empty.
std::filesystem::path HuggingFaceRepository(const std::filesystem::path& dir);

}  // namespace expertd
