#include <cuda_bf16.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/step_kernels.h"

namespace expertd::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void round_to_bf16(const float4* from, uint2* to, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float4 values = from[i];
  const __nv_bfloat162 low = __float22bfloat162_rn({values.x, values.y});
  const __nv_bfloat162 high = __float22bfloat162_rn({values.z, values.w});
  to[i] = {*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
}

}  // namespace

absl::Status PrepareStepKernels() {
  cudaFuncAttributes attributes;
  return EXPERTD_CUDA_STATUS(cudaFuncGetAttributes(&attributes, round_to_bf16));
}

// Rows are a multiple of 64 elements, so four at a time come out even.
absl::Status LaunchRoundToBf16(const float* from, uint16_t* to, int64_t count,
                               cudaStream_t stream) {
  const int64_t quads = count / 4;
  if (quads == 0) return absl::OkStatus();
  round_to_bf16<<<static_cast<uint32_t>((quads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(from), reinterpret_cast<uint2*>(to), quads);
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

}  // namespace expertd::cuda
