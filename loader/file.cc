#include "loader/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace expertd {
namespace {

std::string ErrorText(int error) { return std::generic_category().message(error); }

FileIdentity IdentityOf(const struct stat& info) {
  return FileIdentity{
      .bytes = static_cast<uint64_t>(info.st_size),
      .mtime_ns = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec,
      .inode = static_cast<uint64_t>(info.st_ino)};
}

}  // namespace

std::string DescribeIdentity(const FileIdentity& identity) {
  return absl::StrCat(identity.bytes, " bytes, inode ", identity.inode, ", modified at ",
                      identity.mtime_ns, " ns");
}

ReadOnlyFile::ReadOnlyFile(std::filesystem::path path, int descriptor)
    : path_(std::move(path)), descriptor_(descriptor) {}

ReadOnlyFile::ReadOnlyFile(ReadOnlyFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

ReadOnlyFile& ReadOnlyFile::operator=(ReadOnlyFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

ReadOnlyFile::~ReadOnlyFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

absl::StatusOr<ReadOnlyFile> ReadOnlyFile::Open(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a pipe by that name must not wait for a writer.
  int descriptor;
  do {
    descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) {
    const std::string text = absl::StrCat(path.string(), ": ", ErrorText(errno));
    return errno == ENOENT ? absl::NotFoundError(text) : absl::InvalidArgumentError(text);
  }
  ReadOnlyFile file(path, descriptor);
  struct stat info;
  if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ": not a regular file"));
  }
  return file;
}

absl::StatusOr<FileIdentity> ReadOnlyFile::Identity() const {
  struct stat info;
  if (::fstat(descriptor_, &info) != 0) {
    return absl::DataLossError(absl::StrCat(path_.string(), ": ", ErrorText(errno)));
  }
  return IdentityOf(info);
}

absl::Status ReadOnlyFile::ReadAt(uint64_t offset, absl::Span<uint8_t> into) const {
  return ReadFully(
      [this](void* to, uint64_t bytes, uint64_t from) -> int64_t {
        return ::pread(descriptor_, to, bytes, static_cast<off_t>(from));
      },
      path_.string(), offset, into);
}

absl::Status ReadFully(const ReadFunction& read, const std::string& name, uint64_t offset,
                       absl::Span<uint8_t> into) {
  uint64_t done = 0;
  while (done < into.size()) {
    const int64_t got = read(into.data() + done, into.size() - done, offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return absl::DataLossError(
          absl::StrCat(name, ": reading at ", offset + done, ": ", ErrorText(errno)));
    }
    if (got == 0) {
      return absl::DataLossError(absl::StrCat(name, ": ends at ", offset + done, ", expected ",
                                              into.size() - done, " bytes more"));
    }
    done += static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadSmallFile(const std::filesystem::path& path, uint64_t max_bytes) {
  absl::StatusOr<ReadOnlyFile> file = ReadOnlyFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::StatusOr<FileIdentity> identity = file->Identity();
  if (!identity.ok()) return identity.status();
  if (identity->bytes > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ": found ", identity->bytes,
                                                   " bytes, expected at most ", max_bytes));
  }
  std::string text(identity->bytes, '\0');
  const absl::Status status =
      file->ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size()));
  if (!status.ok()) return status;
  return text;
}

}  // namespace expertd
