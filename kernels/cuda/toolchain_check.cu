#include <nccl.h>
#include <nccl_device.h>

#include <cstdint>

// Nothing runs this file: it is in the build so that a machine without a GPU (CI) still refuses a
// toolchain that cannot compile what the kernels need: NCCL's device API and sm_90a instructions.
namespace expertd::cuda {

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 7), "NCCL's device API needs 2.28.7");

namespace {

// One m64n8k16 product with the weights in registers, the form the fused kernel uses.
__device__ void multiply_once(float (&d)[4], const uint32_t (&a)[4], uint64_t tokens_descriptor) {
  asm volatile(
      "wgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, "
      "1, 1, 1, 0;\n"
      "wgmma.commit_group.sync.aligned;\n"
      "wgmma.wait_group.sync.aligned 0;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens_descriptor));
}

}  // namespace

__global__ void toolchain_check(ncclDevComm comm, ncclWindow_t window, float* sums) {
  __shared__ alignas(1024) uint16_t tokens[8 * 64];
  float d[4] = {};
  const uint32_t a[4] = {threadIdx.x, 0, 0, 0};
  const auto address = static_cast<uint64_t>(__cvta_generic_to_shared(tokens));
  multiply_once(d, a, (address >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62));
  auto* peer = static_cast<float*>(ncclGetLsaPointer(window, 0, comm.lsaRank));
  peer[threadIdx.x] = sums[threadIdx.x] + d[0];
}

}  // namespace expertd::cuda
