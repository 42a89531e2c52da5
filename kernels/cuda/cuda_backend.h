#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "config/limits.h"
#include "kernels/backend.h"
#include "kernels/cuda/memory_plan.h"

namespace expertd {

// Can the kernels run on the device that `devices` chooses (empty: device 0)? FAILED_PRECONDITION
// where no device is visible and for its architecture, INVALID_ARGUMENT if this one does not exist.
// Creates no context.
absl::Status CheckCudaDevice(const std::vector<int32_t>& devices);

// One rank on one GPU. F32 hidden states are rounded to BF16 on entry. Everything that can be wrong
// is a Status before any launch: INVALID_ARGUMENT (geometry, limits, a device that does not exist),
// FAILED_PRECONDITION (no device, or not of the architecture), RESOURCE_EXHAUSTED (memory: says the
// largest max_tokens_per_rank that fits), UNIMPLEMENTED (more than one rank).
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const BackendOptions& options);

namespace cuda {

// What MakeCudaBackend(BackendOptions) leaves at its default.
struct CudaBackendOptions {
  BackendOptions common;
  KernelPath path = KernelPath::kFused;
  absl::Duration step_timeout = absl::Milliseconds(limits::kStepTimeoutMs);
};

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options);

// The part of the checks that needs no device.
absl::Status CheckOptions(const BackendOptions& options);

}  // namespace cuda
}  // namespace expertd
