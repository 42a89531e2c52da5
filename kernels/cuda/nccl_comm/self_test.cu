#include "kernels/cuda/check.h"
#include "kernels/cuda/nccl_comm/self_test.h"
#include "kernels/cuda/ptx/memory.cuh"

// Two kernels, so that no check keeps a write from running: writing waits for nobody, and every
// check waits only for writes of the peers.
namespace expertd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWordBytes = sizeof(uint4);
constexpr int kPollsPerClock = 64;  // how often a wait looks at the clock

// Never zero, which is what an untouched window holds.
__device__ uint4 pattern_of(int writer, int reader, uint32_t round, int64_t word) {
  const auto low = static_cast<uint32_t>(word);
  const uint32_t mixed = low * 2654435761u + round * 40503u + writer * 97u + reader * 193u;
  return uint4{mixed | 1u, mixed ^ 0x9e3779b9u, low, (round << 16) + writer + 1};
}

// The words of part blockIdx.x of a slot.
struct Part {
  int64_t begin;
  int64_t end;
};
__device__ Part part_of(int64_t slot_bytes) {
  const int64_t words = slot_bytes / kWordBytes;
  const int64_t each = (words + gridDim.x - 1) / gridDim.x;
  const int64_t begin = min(words, each * blockIdx.x);
  return {begin, min(words, begin + each)};
}

__device__ uint32_t* flag_of(const SelfTestRun& run, int window, int writer) {
  const int64_t index = static_cast<int64_t>(writer) * kSelfTestParts + blockIdx.x;
  return run.peers.at<uint32_t>(window, run.flags_offset) + index;
}

// Grid (parts, readers).
__global__ void __launch_bounds__(kThreads)
    write_pattern(const __grid_constant__ SelfTestRun run, int64_t slot_bytes) {
  const int writer = run.peers.rank;
  const int reader = static_cast<int>(blockIdx.y);
  auto* slot = run.peers.at<uint4>(reader, writer * slot_bytes);
  const Part part = part_of(slot_bytes);
  for (int64_t w = part.begin + threadIdx.x; w < part.end; w += kThreads) {
    slot[w] = pattern_of(writer, reader, run.round, w);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();  // the block's writes before its flag
    *static_cast<volatile uint32_t*>(flag_of(run, reader, writer)) = run.round;
  }
}

// Also ends once another block waited in vain for the same writer: however many blocks have to take
// turns on the device, they wait `limit_ns` together.
__device__ bool wait_for(const uint32_t* flag, uint32_t round, uint64_t limit_ns,
                         const uint32_t* timed_out) {
  const uint64_t begin = ptx::globaltimer_ns();
  for (uint32_t polls = 1;; ++polls) {
    if (ptx::ld_relaxed_sys(flag) == round) {
      __threadfence_system();  // the flag before what the block reads
      return true;
    }
    if (polls % kPollsPerClock != 0) continue;
    if (ptx::globaltimer_ns() - begin > limit_ns || ptx::ld_relaxed_gpu(timed_out) != 0) {
      return false;
    }
  }
}

// Grid (parts, writers).
__global__ void __launch_bounds__(kThreads)
    check_pattern(const __grid_constant__ SelfTestRun run, int64_t slot_bytes) {
  const int reader = run.peers.rank;
  const int writer = static_cast<int>(blockIdx.y);
  SelfTestRecord* record = run.records + writer;
  const bool came = threadIdx.x != 0 || wait_for(flag_of(run, reader, writer), run.round,
                                                 run.wait_ns, &record->timed_out);
  if (!__syncthreads_and(came)) {
    if (threadIdx.x == 0) atomicExch(&record->timed_out, 1u);
    return;
  }
  const auto* slot = run.peers.at<const volatile uint4>(reader, writer * slot_bytes);
  const Part part = part_of(slot_bytes);
  for (int64_t w = part.begin + threadIdx.x; w < part.end; w += kThreads) {
    const uint4 expected = pattern_of(writer, reader, run.round, w);
    const uint4 found = {slot[w].x, slot[w].y, slot[w].z, slot[w].w};
    const bool wrong[] = {found.x != expected.x, found.y != expected.y, found.z != expected.z,
                          found.w != expected.w};
    if (!wrong[0] && !wrong[1] && !wrong[2] && !wrong[3]) continue;
    if (atomicAdd(reinterpret_cast<unsigned long long*>(&record->num_wrong), 1ull) == 0) {
      record->first_offset = writer * slot_bytes + w * kWordBytes;
      record->found = wrong[0] ? found.x : wrong[1] ? found.y : wrong[2] ? found.z : found.w;
      record->expected = wrong[0]   ? expected.x
                         : wrong[1] ? expected.y
                         : wrong[2] ? expected.z
                                    : expected.w;
    }
  }
}

}  // namespace

int64_t SelfTestSlotBytes(int64_t window_bytes, int32_t num_ranks) {
  return window_bytes / num_ranks / kWordBytes * kWordBytes;
}

int64_t SelfTestFlagBytes(int32_t num_ranks) {
  return int64_t{num_ranks} * kSelfTestParts * static_cast<int64_t>(sizeof(uint32_t));
}

absl::Status LoadSelfTestKernels() {
  cudaFuncAttributes attributes;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, write_pattern));
  return EXPERTD_CUDA_STATUS(cudaFuncGetAttributes(&attributes, check_pattern));
}

absl::Status EnqueueSelfTest(const SelfTestRun& run, cudaStream_t stream) {
  const int64_t slot_bytes = SelfTestSlotBytes(run.window_bytes, run.peers.num_ranks);
  const dim3 grid(kSelfTestParts, run.peers.num_ranks);
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(run.records, 0, sizeof(SelfTestRecord) * run.peers.num_ranks, stream));
  write_pattern<<<grid, kThreads, 0, stream>>>(run, slot_bytes);
  check_pattern<<<grid, kThreads, 0, stream>>>(run, slot_bytes);
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return EXPERTD_CUDA_STATUS(cudaMemsetAsync(run.peers.at<char>(run.peers.rank, 0), 0,
                                             static_cast<size_t>(run.window_bytes), stream));
}

}  // namespace expertd::cuda
