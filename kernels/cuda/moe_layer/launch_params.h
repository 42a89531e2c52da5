#pragma once

#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/params.h"
#include "kernels/layout/packed_weights.h"

namespace expertd::cuda::moe_layer {

// The parameters with the parts that follow from the others: where the regions of the rank's
// workspace lie, and how shared memory is divided.
MoeLayerParams CompleteParams(MoeLayerParams params, layout::WeightFormat format,
                              const KernelConfig& config);

}  // namespace expertd::cuda::moe_layer
