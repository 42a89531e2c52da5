#pragma once

#include "kernels/cuda/moe_layer/params.h"

// One file each, so that they compile side by side.
namespace expertd::cuda::moe_layer {

void (*MxKernel())(MoeLayerParams);
void (*NvKernel())(MoeLayerParams);

}  // namespace expertd::cuda::moe_layer
