#include "kernels/cpu/mapped_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace expertd {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

absl::StatusOr<MappedMemory> MappedMemory::Create(size_t bytes, const char* purpose) {
  MappedMemory memory;
  if (bytes == 0) return memory;
  const size_t mapped_bytes = bytes + kHugePage;
  void* mapping =
      mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", purpose, ": ", bytes, " bytes: ", std::strerror(errno)));
  }
  memory.mapping_ = mapping;
  memory.mapped_bytes_ = mapped_bytes;
  const auto address = reinterpret_cast<uintptr_t>(mapping);
  memory.data_ = reinterpret_cast<uint8_t*>((address + kHugePage - 1) / kHugePage * kHugePage);
  memory.bytes_ = bytes;
  // Advice only: without transparent huge pages the memory works the same, slower.
  (void)madvise(memory.data_, bytes, MADV_HUGEPAGE);
  return memory;
}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  if (this != &other) {
    Unmap();
    mapping_ = std::exchange(other.mapping_, nullptr);
    mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void MappedMemory::Unmap() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
  mapping_ = nullptr;
}

}  // namespace expertd
