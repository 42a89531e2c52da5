#include "kernels/cuda/nccl_comm/nccl_status.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/cuda/check.h"

namespace expertd::cuda {
namespace {

constexpr absl::Duration kPollEvery = absl::Microseconds(50);

absl::StatusCode CodeOf(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError:
      return absl::StatusCode::kUnavailable;
    case ncclInvalidUsage:
    case ncclInvalidArgument:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::Status NcclStatus(ncclResult_t result, const std::string& what) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  std::string text = absl::StrCat(what, ": ", ncclGetErrorString(result));
  const char* said = ncclGetLastError(nullptr);
  if (said != nullptr && said[0] != '\0') absl::StrAppend(&text, "; NCCL says: ", said);
  return absl::Status(CodeOf(result), text);
}

absl::Status AwaitNccl(ncclComm_t comm, ncclResult_t called, absl::Time deadline,
                       const std::string& what) {
  if (absl::Status status = NcclStatus(called, what); !status.ok()) return status;
  while (true) {
    ncclResult_t state = ncclSuccess;
    if (absl::Status status = NcclStatus(ncclCommGetAsyncError(comm, &state), what); !status.ok()) {
      return status;
    }
    if (state != ncclInProgress) return NcclStatus(state, what);
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat(what, ": a peer did not come in time"));
    }
    absl::SleepFor(kPollEvery);
  }
}

absl::Status AwaitStream(cudaStream_t stream, ncclComm_t comm, absl::Time deadline) {
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) return EXPERTD_CUDA_STATUS(state);
    if (comm != nullptr) {
      ncclResult_t result = ncclSuccess;
      (void)ncclCommGetAsyncError(comm, &result);
      if (absl::Status s = NcclStatus(result, "while waiting"); !s.ok()) return s;
    }
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError("a peer did not come in time");
    }
    absl::SleepFor(kPollEvery);
  }
}

ncclResult_t DestroyLocally(ncclComm_t comm) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 31, 2)
  return ncclCommAbort(comm);
#else
  return ncclCommDestroy(comm);
#endif
}

}  // namespace expertd::cuda
