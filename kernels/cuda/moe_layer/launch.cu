#include "kernels/cuda/moe_layer/instantiations/instantiations.h"
#include "kernels/cuda/moe_layer/launch.h"
#include "kernels/cuda/moe_layer/traits.h"

namespace expertd::cuda::moe_layer {
namespace {

Kernel KernelFor(layout::WeightFormat format, int variant) {
  return format == layout::WeightFormat::kMx ? MxKernel(variant) : NvKernel(variant);
}

// The parts of the parameters that follow from the others.
MoeLayerParams Complete(MoeLayerParams params, layout::WeightFormat format,
                        const KernelConfig& config) {
  char* base = params.peers.at<char>(params.peers.rank, 0);
  const layout::WorkspaceOffsets& offsets = params.workspace;
  params.local.head = reinterpret_cast<layout::WorkspaceHead*>(base + offsets.head);
  params.local.routes = reinterpret_cast<uint32_t*>(base + offsets.routes);
  params.local.owners = reinterpret_cast<uint8_t*>(base + offsets.owners);
  params.local.max_routes = offsets.max_routes;
  params.local.fc1_done = reinterpret_cast<uint32_t*>(base + offsets.fc1_done);
  params.local.fc2_done = reinterpret_cast<uint32_t*>(base + offsets.fc2_done);
  params.local.h = reinterpret_cast<uint16_t*>(base + offsets.h);
  params.local.y = reinterpret_cast<uint16_t*>(base + offsets.y);
  const int64_t peer_rows = int64_t{params.peers.num_ranks - 1} * offsets.max_tokens;
  params.local.peer_tokens = reinterpret_cast<const uint16_t*>(base + offsets.tokens) +
                             (params.step & 1u) * peer_rows * params.hidden;
  params.local.fc1_done_stride = layout::DoneStride(2 * params.intermediate);
  params.local.fc2_done_stride = layout::DoneStride(params.hidden);
  params.token_tile = config.token_tile;
  params.num_stages = config.num_stages;
  params.num_token_stages = config.num_token_stages;
  params.token_stage_bytes = TokenStageBytes(config.token_tile);
  params.weights_offset = kStateBytes + config.num_token_stages * params.token_stage_bytes;
  params.tables_offset = params.weights_offset + config.num_stages * WeightStageBytes(format);
  return params;
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
                            Complete(params, format, config));
}

}  // namespace expertd::cuda::moe_layer
