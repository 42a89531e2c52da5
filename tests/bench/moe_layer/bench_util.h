#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device_memory.h"

// A benchmark that cannot go on ends with the place and the reason; it may be on any thread.
namespace expertd::bench {

inline void Check(const absl::Status& status, const char* file, int line) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, std::string(status.message()).c_str());
  std::fflush(stdout);
  std::_Exit(1);
}
inline void Check(cudaError_t error, const char* file, int line) {
  Check(cuda::CudaStatus(error, "CUDA", file, line), file, line);
}

}  // namespace expertd::bench

#define BENCH_CHECK(expression) ::expertd::bench::Check((expression), __FILE__, __LINE__)

namespace expertd::bench {

// Memory of one device that lives as long as its owner, which frees it with the device current.
class Arena {
 public:
  template <typename T>
  T* Device(int64_t count) {
    return Make<T>(cuda::MemoryKind::kDevice, count).template as<T>();
  }
  template <typename T>
  T* Device(const std::vector<T>& values) {
    T* const array = Device<T>(static_cast<int64_t>(values.size()));
    BENCH_CHECK(
        cudaMemcpy(array, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return array;
  }
  // Host memory that devices can read and write.
  template <typename T>
  cuda::MemoryBlock& Pinned(int64_t count) {
    return Make<T>(cuda::MemoryKind::kPinned, count);
  }
  void Clear() { blocks_.clear(); }

 private:
  template <typename T>
  cuda::MemoryBlock& Make(cuda::MemoryKind kind, int64_t count) {
    auto block = cuda::MemoryBlock::Allocate(kind, std::max<int64_t>(count, 1) * sizeof(T));
    BENCH_CHECK(block.status());
    blocks_.push_back(*std::move(block));
    return blocks_.back();
  }

  std::deque<cuda::MemoryBlock> blocks_;
};

// Time between two points of a stream.
class StreamTimer {
 public:
  StreamTimer() {
    BENCH_CHECK(cudaEventCreate(&begin_));
    BENCH_CHECK(cudaEventCreate(&end_));
  }
  ~StreamTimer() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  void Begin(cudaStream_t stream) { BENCH_CHECK(cudaEventRecord(begin_, stream)); }
  void End(cudaStream_t stream) { BENCH_CHECK(cudaEventRecord(end_, stream)); }
  // Waits for the end.
  double Us() {
    BENCH_CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    BENCH_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1000.0;
  }

 private:
  cudaEvent_t begin_, end_;
};

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace expertd::bench
