#include "kernels/cuda/moe_layer/instantiations/instantiations.h"
#include "kernels/cuda/moe_layer/launch.h"
#include "kernels/cuda/moe_layer/launch_params.h"
#include "kernels/cuda/moe_layer/traits.h"

namespace expertd::cuda::moe_layer {
namespace {

Kernel KernelFor(layout::WeightFormat format, int variant) {
  return format == layout::WeightFormat::kMx ? MxKernel(variant) : NvKernel(variant);
}

}  // namespace

cudaError_t PrepareDevice() {
  for (const auto format : {layout::WeightFormat::kMx, layout::WeightFormat::kNv}) {
    for (int variant = 0; variant < kNumVariants; ++variant) {
      const cudaError_t error = cudaFuncSetAttribute(
          KernelFor(format, variant), cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t Launch(layout::WeightFormat format, const KernelConfig& config,
                   const MoeLayerParams& params, cudaStream_t stream) {
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(config.num_ctas);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = stream;
  launch.attrs = &cooperative;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, KernelFor(format, VariantFor(config.token_tile)),
                            CompleteParams(params, format, config));
}

}  // namespace expertd::cuda::moe_layer
