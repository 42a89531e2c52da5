#include "kernels/cuda/device_memory.h"

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"

namespace expertd::cuda {
namespace {

absl::Status OutOfMemory(MemoryKind kind, size_t bytes, const absl::Status& status) {
  if (kind == MemoryKind::kPinned) {
    return absl::ResourceExhaustedError(
        absl::StrCat("pinned host memory: asked for ", bytes, " bytes: ", status.message()));
  }
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  (void)cudaMemGetInfo(&free_bytes, &total_bytes);
  return absl::ResourceExhaustedError(absl::StrCat("device memory: asked for ", bytes, " bytes, ",
                                                   free_bytes, " of ", total_bytes, " are free"));
}

}  // namespace

absl::StatusOr<MemoryBlock> MemoryBlock::Allocate(MemoryKind kind, size_t bytes) {
  MemoryBlock block;
  if (bytes == 0) return block;
  absl::Status status =
      kind == MemoryKind::kDevice
          ? EXPERTD_CUDA_STATUS(cudaMalloc(&block.data_, bytes))
          : EXPERTD_CUDA_STATUS(
                cudaHostAlloc(&block.data_, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  if (absl::IsResourceExhausted(status)) return OutOfMemory(kind, bytes, status);
  if (!status.ok()) return status;
  block.kind_ = kind;
  block.bytes_ = bytes;
  block.device_data_ = block.data_;
  if (kind == MemoryKind::kPinned) {
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaHostGetDevicePointer(&block.device_data_, block.data_, 0));
  }
  return block;
}

MemoryBlock& MemoryBlock::operator=(MemoryBlock&& other) noexcept {
  if (this == &other) return *this;
  Free();
  kind_ = other.kind_;
  data_ = std::exchange(other.data_, nullptr);
  device_data_ = std::exchange(other.device_data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

// Errors are ignored: after a sticky error nothing can be freed, and at process exit the driver is
// gone.
void MemoryBlock::Free() {
  if (data_ == nullptr) return;
  (void)(kind_ == MemoryKind::kDevice ? cudaFree(data_) : cudaFreeHost(data_));
  data_ = device_data_ = nullptr;
  bytes_ = 0;
}

Event::~Event() {
  if (event_ != nullptr) (void)cudaEventDestroy(event_);
}

absl::StatusOr<Event> Event::Make() {
  Event event;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventCreate(&event.event_));
  return event;
}

}  // namespace expertd::cuda
