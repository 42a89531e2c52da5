#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/comm/peer.h"
#include "kernels/cuda/nccl_comm/device_checks.h"

// The pattern test of a window. Every rank owns one slot in every rank's window, the windows'
// share of it: together the slots cover the window. Every rank writes a pattern of (writer, reader,
// round, place) to its slot in every window, its own included, and raises a flag for each part;
// every rank waits for the flags in its own window and compares. Behind the window lie the flags.
namespace expertd::cuda {

inline constexpr int32_t kSelfTestParts = 64;  // blocks that write, and check, one slot

// Bytes of one rank's slot, a multiple of 16; what is left over at the end is not tested.
int64_t SelfTestSlotBytes(int64_t window_bytes, int32_t num_ranks);
// Flags of all ranks, to be added to a window; zero before the first round.
int64_t SelfTestFlagBytes(int32_t num_ranks);

struct SelfTestRun {
  PeerMap peers;
  int64_t window_bytes = 0;           // without flags
  int64_t flags_offset = 0;           // from the start of a window
  uint32_t round = 0;                 // from 1, the same on all ranks
  uint64_t wait_ns = 0;               // how long a check waits for a writer's flags
  SelfTestRecord* records = nullptr;  // num_ranks of them, in device memory
};

// Loads the kernels: a lazy load while a peer's kernel runs may wait for it.
absl::Status LoadSelfTestKernels();
// Enqueues writing, checking and zeroing the window. The check waits for the peers' writes only.
absl::Status EnqueueSelfTest(const SelfTestRun& run, cudaStream_t stream);

}  // namespace expertd::cuda
