#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace expertd::cuda {

// Once a device before the first launch: loads the kernels. Loading waits for kernels that run, and
// in a process of several ranks those may wait for a launch of the loading thread.
absl::Status PrepareStepKernels();

// to[i] = from[i] rounded to BF16, to nearest even. F32 hidden states of requests enter this way.
absl::Status LaunchRoundToBf16(const float* from, uint16_t* to, int64_t count, cudaStream_t stream);

}  // namespace expertd::cuda
