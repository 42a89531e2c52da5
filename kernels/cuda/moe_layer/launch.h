#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/params.h"

namespace expertd::cuda::moe_layer {

// Once a device before the first launch: lets the kernels use the shared memory that configurations
// ask for. Loads the kernels, so that no later launch does.
cudaError_t PrepareDevice();

// Enqueues one step, one cooperative launch. `params` carries the configuration's token_tile and
// num_stages (Apply) and everything else.
cudaError_t Launch(layout::WeightFormat format, const KernelConfig& config,
                   const MoeLayerParams& params, cudaStream_t stream);

}  // namespace expertd::cuda::moe_layer
