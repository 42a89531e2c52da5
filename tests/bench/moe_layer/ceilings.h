#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "tests/bench/moe_layer/bench_util.h"

// What the machine itself does, measured in the same run, and the small kernels that a measurement
// needs.
namespace expertd::bench {

// Of one GPU; made with it current.
struct Gpu {
  int num_sms = 0;
  std::string name;
  uint8_t* displace = nullptr;  // read to displace L2
  uint32_t* sink = nullptr;
  uint64_t* clock = nullptr;
};
Gpu MakeGpu(Arena& arena);

// (random word & mask) + base, by index and seed.
void FillRandom(uint32_t* words, int64_t count, uint32_t seed, uint32_t mask, uint32_t base,
                cudaStream_t stream);

// Reads more than L2 holds.
void DisplaceL2(const Gpu& gpu, cudaStream_t stream);

// SM clock over about 50 us behind what the stream holds.
double SmMhz(const Gpu& gpu, cudaStream_t stream);

// GB/s of streaming 3 GB through rings of bulk copies that nobody reads.
double ReadCeiling(const Gpu& gpu);

// 8192^3 BF16 by cublasGemmEx; 0 if the library cannot be loaded.
double VendorTflops(const std::string& cublas);

}  // namespace expertd::bench
