#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace expertd {

// What tells one state of a file from another.
struct FileIdentity {
  uint64_t bytes = 0;
  int64_t mtime_ns = 0;
  uint64_t inode = 0;

  bool operator==(const FileIdentity&) const = default;
};

std::string DescribeIdentity(const FileIdentity& identity);

// A regular file opened for reading. Move-only; ReadAt may be called by several threads.
class ReadOnlyFile {
 public:
  // NOT_FOUND if there is none, INVALID_ARGUMENT if it is not a regular file.
  static absl::StatusOr<ReadOnlyFile> Open(const std::filesystem::path& path);

  ReadOnlyFile(ReadOnlyFile&& other) noexcept;
  ReadOnlyFile& operator=(ReadOnlyFile&& other) noexcept;
  ~ReadOnlyFile();

  // As it is now.
  absl::StatusOr<FileIdentity> Identity() const;

  // Fills `into` from `offset`; DATA_LOSS if the file ends before.
  absl::Status ReadAt(uint64_t offset, absl::Span<uint8_t> into) const;

  const std::filesystem::path& path() const { return path_; }

 private:
  ReadOnlyFile(std::filesystem::path path, int descriptor);

  std::filesystem::path path_;
  int descriptor_ = -1;
};

// pread's signature without the descriptor: bytes read, 0 at the end, -1 with errno.
using ReadFunction = std::function<int64_t(void* into, uint64_t bytes, uint64_t offset)>;

// Repeats `read` after short reads and signals until `into` is full. `name` is for messages.
absl::Status ReadFully(const ReadFunction& read, const std::string& name, uint64_t offset,
                       absl::Span<uint8_t> into);

// A whole small file; INVALID_ARGUMENT if it is larger than `max_bytes`, before anything is
// allocated.
absl::StatusOr<std::string> ReadSmallFile(const std::filesystem::path& path, uint64_t max_bytes);

}  // namespace expertd
