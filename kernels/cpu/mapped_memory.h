#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"

namespace expertd {

// Zeroed anonymous memory, 2 MiB aligned so that the kernel can back it with huge pages. Pages
// become real when first touched: a workspace sized for the worst routing costs what a step really
// uses.
class MappedMemory {
 public:
  // RESOURCE_EXHAUSTED with the size and `purpose` if the system refuses.
  static absl::StatusOr<MappedMemory> Create(size_t bytes, const char* purpose);

  MappedMemory() = default;
  MappedMemory(MappedMemory&& other) noexcept
      : mapping_(std::exchange(other.mapping_, nullptr)),
        mapped_bytes_(std::exchange(other.mapped_bytes_, 0)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  MappedMemory& operator=(MappedMemory&& other) noexcept;
  ~MappedMemory() { Unmap(); }

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  void Unmap();

  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Hands out aligned pieces of one block. With a null base it only adds up: the same code that
// places the pieces first says how much they need.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}

  template <typename T>
  T* Take(int64_t count) {
    const size_t begin = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlignment = 64;  // one cache line, one AVX-512 vector

  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace expertd
