#include <cuda_runtime.h>
#include <dlfcn.h>

#include <vector>

#include "kernels/cuda/ptx/copy.cuh"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/memory.cuh"
#include "tests/bench/moe_layer/ceilings.h"

namespace expertd::bench {
namespace {

namespace ptx = cuda::ptx;

constexpr int64_t kDisplaceBytes = 256ll << 20;
constexpr int kRepeats = 9;

__global__ void fill_random(uint32_t* words, int64_t count, uint32_t seed, uint32_t mask,
                            uint32_t base) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1u ^ seed * 0x85EBCA77u;
    x ^= x >> 15;
    x *= 0x2C1B3C6Du;
    x ^= x >> 12;
    x *= 0x297A2D39u;
    x ^= x >> 15;
    words[i] = (x & mask) + base;
  }
}

__global__ void read_all(const uint4* data, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 value = data[i];
    sum ^= value.x ^ value.y ^ value.z ^ value.w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

// Streams memory through a ring of bulk copies that nobody reads: the read ceiling.
constexpr int kStreamBytes = 17408, kStreamStages = 11;
__global__ void stream_all(const uint8_t* data, int64_t chunks) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t barriers[kStreamStages];
  if (threadIdx.x != 0) return;
  for (auto& barrier : barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
  ptx::fence_mbarrier_init();
  const uint64_t policy = ptx::policy_evict_first();
  const int64_t begin = chunks * blockIdx.x / gridDim.x,
                end = chunks * (blockIdx.x + 1) / gridDim.x;
  int64_t loaded = begin;
  const auto load = [&](int stage) {
    const uint32_t barrier = ptx::shared_address(&barriers[stage]);
    ptx::mbarrier_arrive_expect_tx(barrier, kStreamBytes);
    ptx::bulk_copy(ptx::shared_address(ring) + stage * kStreamBytes, data + loaded * kStreamBytes,
                   kStreamBytes, barrier, policy);
    ++loaded;
  };
  for (int stage = 0; stage < kStreamStages && loaded < end; ++stage) load(stage);
  int stage = 0;
  uint32_t phase = 0;
  for (int64_t i = begin; i < end; ++i) {
    while (!ptx::mbarrier_try_wait(ptx::shared_address(&barriers[stage]), phase)) {
    }
    if (loaded < end) load(stage);
    if (++stage == kStreamStages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// SM clock over about 50 us: [0] clocks, [1] nanoseconds.
__global__ void read_clock(uint64_t* out) {
  const uint64_t begin_ns = ptx::globaltimer_ns();
  const long long begin = clock64();
  while (ptx::globaltimer_ns() - begin_ns < 50000) {
  }
  out[0] = clock64() - begin;
  out[1] = ptx::globaltimer_ns() - begin_ns;
}

template <typename Work>
double MedianUs(Work work) {
  StreamTimer timer;
  std::vector<double> us;
  for (int i = 0; i < kRepeats; ++i) {
    timer.Begin(nullptr);
    work();
    timer.End(nullptr);
    us.push_back(timer.Us());
  }
  BENCH_CHECK(cudaGetLastError());
  return Median(us);
}

}  // namespace

Gpu MakeGpu(Arena& arena) {
  Gpu gpu;
  int device = 0;
  cudaDeviceProp properties;
  BENCH_CHECK(cudaGetDevice(&device));
  BENCH_CHECK(cudaGetDeviceProperties(&properties, device));
  gpu.num_sms = properties.multiProcessorCount;
  gpu.name = properties.name;
  gpu.displace = arena.Device<uint8_t>(kDisplaceBytes);
  gpu.sink = arena.Device<uint32_t>(1);
  gpu.clock = arena.Device<uint64_t>(2);
  return gpu;
}

void FillRandom(uint32_t* words, int64_t count, uint32_t seed, uint32_t mask, uint32_t base,
                cudaStream_t stream) {
  fill_random<<<1024, 256, 0, stream>>>(words, count, seed, mask, base);
}

void DisplaceL2(const Gpu& gpu, cudaStream_t stream) {
  read_all<<<gpu.num_sms * 4, 512, 0, stream>>>(reinterpret_cast<const uint4*>(gpu.displace),
                                                kDisplaceBytes / 16, gpu.sink);
}

double SmMhz(const Gpu& gpu, cudaStream_t stream) {
  read_clock<<<1, 1, 0, stream>>>(gpu.clock);
  BENCH_CHECK(cudaStreamSynchronize(stream));
  uint64_t value[2];
  BENCH_CHECK(cudaMemcpy(value, gpu.clock, sizeof(value), cudaMemcpyDeviceToHost));
  return static_cast<double>(value[0]) / static_cast<double>(value[1]) * 1e3;
}

double ReadCeiling(const Gpu& gpu) {
  Arena arena;
  const int64_t chunks = (3ll << 30) / kStreamBytes;
  uint8_t* data = arena.Device<uint8_t>(chunks * kStreamBytes);
  FillRandom(reinterpret_cast<uint32_t*>(data), chunks * kStreamBytes / 4, 1, ~0u, 0, nullptr);
  BENCH_CHECK(cudaFuncSetAttribute(stream_all, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kStreamBytes * kStreamStages));
  const double us = MedianUs(
      [&] { stream_all<<<gpu.num_sms, 32, kStreamBytes * kStreamStages>>>(data, chunks); });
  return chunks * double{kStreamBytes} / us * 1e-3;
}

double VendorTflops(const std::string& cublas) {
  void* library = dlopen(cublas.c_str(), RTLD_NOW);
  if (library == nullptr) return 0;
  using Create = int (*)(void**);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       const void*, int, int, const void*, void*, int, int, int, int);
  const auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
  const auto gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
  void* handle = nullptr;
  if (!create || !gemm || create(&handle) != 0) return 0;
  constexpr int kSize = 8192, kBf16 = 14, kComputeF32 = 68;
  Arena arena;
  uint32_t* memory[3];
  for (auto& matrix : memory) {
    matrix = arena.Device<uint32_t>(int64_t{kSize} * kSize / 2);
    FillRandom(matrix, int64_t{kSize} * kSize / 2, 7, 0x807f807fu, 0x3f003f00u, nullptr);
  }
  const float one = 1, zero = 0;
  const double us = MedianUs([&] {
    gemm(handle, 1, 0, kSize, kSize, kSize, &one, memory[0], kBf16, kSize, memory[1], kBf16, kSize,
         &zero, memory[2], kBf16, kSize, kComputeF32, -1);
  });
  return 2.0 * kSize * kSize * kSize / us * 1e-6;
}

}  // namespace expertd::bench
