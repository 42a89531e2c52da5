#pragma once

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
absl::StatusOr<ncclUniqueId> MakeCommunicatorId();

struct CommunicatorOptions {
  ncclUniqueId id;
  int32_t rank = 0;
  int32_t num_ranks = 1;
  absl::Duration limit;  // of every collective call here; beyond it the rank gives up
};

// One rank's membership of a group of GPUs: an NCCL communicator and, where every pair of ranks is
// mapped into each other, a symmetric window that kernels store to. Every rank has one thread (in
// one process or in several), its device current; Create, OpenWindow and SelfTest are collective:
// all ranks call them in the same order. One rank is a group too and needs no peer.
class Communicator {
 public:
  // Errors name the condition that fails and, where it is a pair, both devices.
  static absl::StatusOr<std::unique_ptr<Communicator>> Create(const CommunicatorOptions& options);

  // Local: waits for nobody. The rank's kernels have ended, and the peers' kernels too, or they
  // belong to a generation that is given up (their stores then land in memory that nobody reads).
  ~Communicator();

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int32_t rank() const;
  int32_t num_ranks() const;

  // Whether kernels can store into every peer. If not, `why_not_mapped` says what is missing, and
  // only host-launched NCCL connects the ranks.
  bool mapped() const;
  const std::string& why_not_mapped() const;

  // Collective, once, only if mapped(): `bytes` of device memory on every rank, the same size, all
  // zero, newly allocated.
  absl::Status OpenWindow(int64_t bytes);
  const PeerMap& peers() const;  // of the window
  int64_t window_bytes() const;

  // Collective: every rank writes a pattern of its own to every peer through the window and checks
  // what came. Names the pair that fails. Leaves the window zero.
  absl::Status SelfTest(cudaStream_t stream);

  ncclComm_t nccl() const;  // for host-launched collectives

 private:
  class Impl;
  explicit Communicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertd::cuda
