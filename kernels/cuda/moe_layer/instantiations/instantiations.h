#pragma once

#include "kernels/cuda/moe_layer/params.h"

// One file a weight format, so that they compile side by side.
namespace expertd::cuda::moe_layer {

using Kernel = void (*)(MoeLayerParams);

Kernel MxKernel(int variant);
Kernel NvKernel(int variant);

}  // namespace expertd::cuda::moe_layer
