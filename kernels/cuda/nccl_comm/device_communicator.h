#pragma once

#include <nccl.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"

namespace expertd::cuda {

// NCCL's device communicator of one rank. Kernels do not use it; making it is the one call that
// says whether the ranks can be mapped into each other, and it must come before the window. What
// knows NCCL's device headers is behind this.
class DeviceCommunicator {
 public:
  DeviceCommunicator();
  ~DeviceCommunicator();  // frees the struct only: see Destroy

  DeviceCommunicator(const DeviceCommunicator&) = delete;
  DeviceCommunicator& operator=(const DeviceCommunicator&) = delete;

  // Collective; returns at once on a non-blocking communicator. The object must outlive the call.
  ncclResult_t Create(ncclComm_t comm);
  ncclResult_t Destroy(ncclComm_t comm);  // local

  // Valid once Create is done: the ranks that can store into each other, and this one's place.
  int32_t lsa_size() const;
  int32_t lsa_rank() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Loads the kernel of FetchPeerAddresses: a lazy load while a peer's kernel runs may wait for it.
absl::Status LoadWindowKernels();

// Enqueues the read of where each rank's window is mapped here; `addresses`: num_ranks of them, in
// device memory.
absl::Status FetchPeerAddresses(ncclWindow_t window, int32_t num_ranks, uint64_t* addresses,
                                cudaStream_t stream);

}  // namespace expertd::cuda
