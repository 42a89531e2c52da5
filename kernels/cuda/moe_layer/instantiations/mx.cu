#include "kernels/cuda/moe_layer/instantiations/instantiations.h"
#include "kernels/cuda/moe_layer/kernel.cuh"

namespace expertd::cuda::moe_layer {

void (*MxKernel())(MoeLayerParams) { return moe_layer_kernel<layout::WeightFormat::kMx>; }

}  // namespace expertd::cuda::moe_layer
