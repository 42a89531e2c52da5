#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

// NCCL errors as Status, and the wait that a non-blocking communicator needs after every call.
namespace expertd::cuda {

// OK for ncclSuccess and ncclInProgress. Otherwise "what: NCCL's text; NCCL says: its last
// warning": UNAVAILABLE for a lost peer, FAILED_PRECONDITION for what NCCL calls invalid (the
// machine or the environment lacks something), otherwise INTERNAL.
absl::Status NcclStatus(ncclResult_t result, const std::string& what);

// The outcome of a call on a non-blocking communicator that returned `called`: waits, polling,
// until the communicator is no longer in progress, at most until `deadline`. After
// DEADLINE_EXCEEDED or any other error the communicator must be aborted
// (Communicator::Abort). What the call writes must outlive the wait.
absl::Status AwaitNccl(ncclComm_t comm, ncclResult_t called, absl::Time deadline,
                       const std::string& what);

// Waits, polling, until `stream` has passed what was enqueued, at most until `deadline`, or until
// the communicator, if there is one, reports an error.
absl::Status AwaitStream(cudaStream_t stream, ncclComm_t comm, absl::Time deadline);

// ncclCommDestroy where it waits for no peer, otherwise ncclCommAbort (NCCL 2.31.2 and later).
ncclResult_t DestroyLocally(ncclComm_t comm);

}  // namespace expertd::cuda
