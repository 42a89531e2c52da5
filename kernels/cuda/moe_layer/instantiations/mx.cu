#include "kernels/cuda/moe_layer/kernel.cuh"

namespace expertd::cuda::moe_layer {

Kernel MxKernel(int variant) { return variant_kernel<layout::WeightFormat::kMx>(variant); }

}  // namespace expertd::cuda::moe_layer
