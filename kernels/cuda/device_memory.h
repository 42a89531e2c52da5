#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"

// Memory with an owner. Allocation and release call CUDA: on the thread that owns the device only.
namespace expertd::cuda {

enum class MemoryKind {
  kDevice,  // cudaMalloc
  kPinned,  // page-locked host memory, also mapped for the device
};

// Move-only block of bytes; empty when default-made. Contents are undefined after Allocate.
class MemoryBlock {
 public:
  MemoryBlock() = default;
  MemoryBlock(MemoryBlock&& other) noexcept { *this = std::move(other); }
  MemoryBlock& operator=(MemoryBlock&& other) noexcept;
  ~MemoryBlock() { Free(); }

  // bytes = 0 gives an empty block. RESOURCE_EXHAUSTED names the bytes asked for and what is free.
  static absl::StatusOr<MemoryBlock> Allocate(MemoryKind kind, size_t bytes);

  void Free();

  // Host address of pinned memory, device address of device memory.
  void* data() const { return data_; }
  // The address kernels use; for pinned memory the mapping of data().
  void* device_data() const { return device_data_; }
  size_t bytes() const { return bytes_; }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  MemoryKind kind_ = MemoryKind::kDevice;
  void* data_ = nullptr;
  void* device_data_ = nullptr;
  size_t bytes_ = 0;
};

// An event that records time.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();

  static absl::StatusOr<Event> Make();
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace expertd::cuda
