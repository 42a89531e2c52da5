#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

// CUDA errors as Status. The macro only captures the call site; the work is in CudaStatus.
namespace expertd::cuda {

// OK for cudaSuccess. Otherwise "file:line: expression: CUDA's name and text", and the error that
// CUDA keeps for the thread is cleared. RESOURCE_EXHAUSTED for out of memory, NOT_FOUND where there
// is no device or no driver, otherwise INTERNAL; a sticky error is marked fatal (kernels/fatal.h).
absl::Status CudaStatus(cudaError_t error, const char* expression, const char* file, int line);

// After such an error every CUDA call of the process fails: only a new process helps.
bool IsSticky(cudaError_t error);

}  // namespace expertd::cuda

#define EXPERTD_CUDA_STATUS(expression) \
  ::expertd::cuda::CudaStatus((expression), #expression, __FILE__, __LINE__)

#define EXPERTD_CUDA_RETURN_IF_ERROR(expression)                                         \
  do {                                                                                   \
    if (absl::Status cuda_status = EXPERTD_CUDA_STATUS(expression); !cuda_status.ok()) { \
      return cuda_status;                                                                \
    }                                                                                    \
  } while (false)
