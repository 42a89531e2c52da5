#include "kernels/cuda/moe_layer/kernel.cuh"

namespace expertd::cuda::moe_layer {

Kernel NvKernel(int variant) { return variant_kernel<layout::WeightFormat::kNv>(variant); }

}  // namespace expertd::cuda::moe_layer
