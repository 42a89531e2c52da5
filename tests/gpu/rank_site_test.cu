#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device_memory.h"
#include "tests/gpu/testing/ep_fixture.h"

// What the tests of several ranks rely on: kernels of all ranks run at the same time, as large as
// the fused kernel is, and store into each other's workspaces.
namespace expertd {
namespace {

constexpr int kSharedBytes = 200 << 10;  // one CTA an SM
constexpr uint64_t kLimitNs = 1'000'000'000;

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Says hello to every rank, and counts the ranks that said so to this one.
__global__ void meet(cuda::PeerMap peers, uint32_t step, int* met) {
  if (threadIdx.x != 0 || blockIdx.x != gridDim.x - 1) return;
  for (int to = 0; to < peers.num_ranks; ++to) {
    *peers.at<volatile uint32_t>(to, 4 * peers.rank) = step;
  }
  const uint64_t start = now_ns();
  int found = 0;
  while (found < peers.num_ranks && now_ns() - start < kLimitNs) {
    found = 0;
    for (int from = 0; from < peers.num_ranks; ++from) {
      found += *peers.at<volatile uint32_t>(peers.rank, 4 * from) >= step;
    }
  }
  *met = found;
}

class RankSiteTest : public testing::EpTest {};

INSTANTIATE_TEST_SUITE_P(Ranks, RankSiteTest, ::testing::ValuesIn(testing::kEpSites),
                         testing::EpSiteName);

TEST_P(RankSiteTest, CooperativeKernelsOfAllRanksRunAtTheSameTimeAndReachEachOther) {
  auto site = testing::RankSite::Open(GetParam().mode, num_ranks(), 4096);
  ASSERT_TRUE(site.ok()) << site.status();
  auto met = cuda::MemoryBlock::Allocate(cuda::MemoryKind::kPinned, num_ranks() * sizeof(int));
  ASSERT_TRUE(met.ok()) << met.status();
  const absl::Status ready = (*site)->ForEach([](int, cudaStream_t) {
    return EXPERTD_CUDA_STATUS(
        cudaFuncSetAttribute(meet, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  });
  ASSERT_TRUE(ready.ok()) << ready;
  for (uint32_t step = 1; step <= 3; ++step) {
    std::fill_n(met->as<int>(), num_ranks(), -1);
    const absl::Status launched = (*site)->ForEach([&](int rank, cudaStream_t stream) {
      cudaLaunchAttribute cooperative = {};
      cooperative.id = cudaLaunchAttributeCooperative;
      cooperative.val.cooperative = 1;
      cudaLaunchConfig_t launch = {};
      launch.gridDim = dim3((*site)->num_ctas());
      launch.blockDim = dim3(32);
      launch.dynamicSmemBytes = kSharedBytes;
      launch.stream = stream;
      launch.attrs = &cooperative;
      launch.numAttrs = 1;
      return EXPERTD_CUDA_STATUS(cudaLaunchKernelEx(&launch, meet, (*site)->peers(rank), step,
                                                    static_cast<int*>(met->device_data()) + rank));
    });
    ASSERT_TRUE(launched.ok()) << launched;
    ASSERT_TRUE((*site)->Synchronise().ok());
    for (int rank = 0; rank < num_ranks(); ++rank) {
      EXPECT_EQ(met->as<int>()[rank], num_ranks()) << "rank " << rank << ", step " << step;
    }
  }
}

}  // namespace
}  // namespace expertd
