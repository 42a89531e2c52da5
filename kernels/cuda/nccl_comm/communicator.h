#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/cuda/comm/peer.h"

namespace expertd::cuda {

// Shared by all ranks of a group before they create their communicators; made by one of them.
// This and Create set NCCL_NVLS_ENABLE=0 in the environment, whatever it was: NVLink multicast is
// never used. Call the first of them before other threads read the environment.
absl::StatusOr<ncclUniqueId> MakeCommunicatorId();

struct CommunicatorOptions {
  ncclUniqueId id;  // unused by one rank
  int32_t rank = 0;
  int32_t num_ranks = 1;
  absl::Duration limit;  // of every collective call here; beyond it the rank gives up
};

// One rank's membership of a group of GPUs: an NCCL communicator and, where every pair of ranks is
// mapped into each other, a symmetric window that kernels store to. Every rank has one thread (in
// one process or in several), its device current; Create, OpenWindow and SelfTest are collective:
// all ranks call them in the same order. One rank is a group too: it needs no peer, makes no NCCL
// call, and its window is ordinary device memory.
//
// Errors of a collective call. All of them name the rank and the step.
// - A peer that does not come within `limit`: DEADLINE_EXCEEDED.
// - What one rank finds (no memory, a wrong pattern, unequal sizes): all ranks that are there
//   return it.
// - A call of CUDA or NCCL that does not come back: DEADLINE_EXCEEDED marked fatal
//   (kernels/fatal.h), limits::kNcclGraceMs after `limit`. The thread inside it is left behind and
//   nothing of the group is freed: the process must end.
// After an error only the destructor may be called.
class Communicator {
 public:
  static absl::StatusOr<std::unique_ptr<Communicator>> Create(const CommunicatorOptions& options);

  // Local: waits for no peer, and at most limits::kNcclTeardownMs; what is not freed by then is
  // freed by a thread left behind. The rank's kernels have ended, and the peers' kernels too, or
  // they belong to a generation that is given up (their stores then land in memory that nobody
  // reads).
  ~Communicator();

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int32_t rank() const;
  int32_t num_ranks() const;

  // Whether kernels can store into every peer; the same on all ranks. If not, `why_not_mapped` says
  // what is missing, and only host-launched NCCL connects the ranks.
  bool mapped() const;
  const std::string& why_not_mapped() const;

  // Collective, once, only if mapped(): `bytes` of device memory on every rank, the same size (at
  // least 16 a rank of the group), all zero, newly allocated.
  absl::Status OpenWindow(int64_t bytes);
  // Device memory that such a window takes: rounded up, with the self-test's flags behind the
  // window.
  static int64_t MemoryBytes(int64_t window_bytes, int32_t num_ranks);
  const PeerMap& peers() const;  // of the window
  int64_t window_bytes() const;

  // Collective, on an open window that no kernel uses: every rank writes a pattern of its own to
  // every rank through the window and checks what came. Names the pair that fails. Leaves the
  // window zero, on all ranks before any of them returns. Waits for `stream`.
  absl::Status SelfTest(cudaStream_t stream);

  // For host-launched collectives of a few bytes, and to split communicators off that move more:
  // this one has a single channel. Null for one rank. Non-blocking: after every call (or
  // ncclGroupEnd) wait with AwaitNccl (nccl_status.h) before anything else uses the communicator or
  // the stream.
  ncclComm_t nccl() const;

  // Ends NCCL's own kernels that wait for a peer; local. For a group that is given up: afterwards
  // only the destructor may be called. Kernels that store through the window must have ended.
  void Abort();

 private:
  class Impl;
  explicit Communicator(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // shared with a thread that is given up
};

}  // namespace expertd::cuda
