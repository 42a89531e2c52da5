#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/memory_plan.h"

namespace expertd {

// The GPUs that a process with `ranks` ranks (0: one a visible GPU) and `devices` (empty: the first
// ones) uses, one a rank. FAILED_PRECONDITION where no device is visible and for an architecture
// that the kernels cannot run on; INVALID_ARGUMENT if fewer are visible than ranks, for a device
// that does not exist or comes twice, and for another number of devices than of ranks. Creates no
// context.
absl::StatusOr<std::vector<int32_t>> FindCudaDevices(const std::vector<int32_t>& devices,
                                                     int32_t ranks);

// One rank a GPU; the placement says how many. F32 hidden states are rounded to BF16 on entry.
// Everything that can be wrong is a Status before any launch: INVALID_ARGUMENT (geometry, limits,
// devices), FAILED_PRECONDITION (no device, or not of the architecture), RESOURCE_EXHAUSTED
// (memory: says the largest max_tokens_per_rank that fits), DEADLINE_EXCEEDED (the ranks do not
// connect).
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const BackendOptions& options);

namespace cuda {

namespace moe_layer {
enum StallPoint : int32_t;
}  // namespace moe_layer

// What MakeCudaBackend(BackendOptions) leaves at its default.
struct CudaBackendOptions {
  BackendOptions common;
  KernelPath path = KernelPath::kFused;
  // Tests only: what `rank` leaves out in its next launch, so that others must give up.
  std::function<moe_layer::StallPoint(int32_t rank)> stall;
};

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options);

// The part of the checks that needs no device.
absl::Status CheckOptions(const CudaBackendOptions& options);

}  // namespace cuda
}  // namespace expertd
