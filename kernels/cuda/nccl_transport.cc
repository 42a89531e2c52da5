#include "kernels/cuda/nccl_transport.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/check.h"
#include "config/limits.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/nccl_comm/nccl_status.h"
#include "kernels/cuda/nccl_comm/watchdog.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

constexpr int64_t kHello = 32;  // bytes that connect a pair

absl::Status EnqueueGroup(ncclComm_t comm, absl::Span<const Transfer> sends,
                          absl::Span<const Transfer> receives, cudaStream_t stream) {
  ncclResult_t result = ncclGroupStart();
  for (const Transfer& send : sends) {
    if (result != ncclSuccess || send.bytes == 0) continue;
    result = ncclSend(send.data, send.bytes, ncclUint8, send.peer, comm, stream);
  }
  for (const Transfer& receive : receives) {
    if (result != ncclSuccess || receive.bytes == 0) continue;
    result = ncclRecv(receive.data, receive.bytes, ncclUint8, receive.peer, comm, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return NcclStatus(result != ncclSuccess ? result : ended, "ncclSend and ncclRecv");
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclTransport>> NcclTransport::Create(Communicator* group,
                                                                     absl::Duration limit,
                                                                     cudaStream_t stream) {
  EXPERTD_CHECK(group != nullptr);
  std::unique_ptr<NcclTransport> transport(new NcclTransport(group->rank(), group->num_ranks()));
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&transport->device_));
  if (transport->num_ranks_ == 1) return transport;
  absl::Status status = transport->Split(group, limit);
  if (status.ok()) status = transport->Connect(limit, stream);
  if (status.ok()) return transport;
  group->Abort();
  absl::Status named(status.code(), absl::StrCat("rank ", transport->rank_,
                                                 ": host exchange: ", status.message()));
  return IsFatal(status) ? MarkFatal(std::move(named)) : named;
}

NcclTransport::~NcclTransport() { End(DestroyLocally, "ncclCommDestroy").IgnoreError(); }

absl::Status NcclTransport::Split(Communicator* group, absl::Duration limit) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  return AwaitNccl(group->nccl(), ncclCommSplit(group->nccl(), 0, rank_, &comm_, &config),
                   absl::Now() + limit, "ncclCommSplit");
}

// NCCL connects a pair when it first exchanges something, and meets the peer's host thread for
// that: on a thread that can be given up.
absl::Status NcclTransport::Connect(absl::Duration limit, cudaStream_t stream) {
  const absl::Time deadline = absl::Now() + limit;
  absl::StatusOr<MemoryBlock> made =
      MemoryBlock::Allocate(MemoryKind::kDevice, 2 * kHello * num_ranks_);
  if (!made.ok()) return made.status();
  const auto hello = std::make_shared<MemoryBlock>(*std::move(made));
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  for (int32_t peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_) continue;
    sends.push_back({peer, hello->as<char>() + 2 * kHello * peer, kHello});
    receives.push_back({peer, hello->as<char>() + 2 * kHello * peer + kHello, kHello});
  }
  auto step = std::make_shared<StepName>();
  step->Set("connecting all pairs");
  absl::Status status =
      RunWithin(limit, absl::StrCat("rank ", rank_), step,
                [=, hello = hello, comm = comm_, device = device_]() -> absl::Status {
                  EXPERTD_CUDA_RETURN_IF_ERROR(cudaSetDevice(device));
                  return EnqueueGroup(comm, sends, receives, stream);
                });
  if (IsFatal(status)) comm_ = nullptr;  // that thread may be inside a call with it
  if (!status.ok()) return status;
  status = AwaitStream(stream, comm_, deadline);
  if (status.ok()) return status;
  if (absl::Status aborted = Abort(); !aborted.ok()) return aborted;
  return status;
}

absl::Status NcclTransport::Exchange(absl::Span<const Transfer> sends,
                                     absl::Span<const Transfer> receives, cudaStream_t stream) {
  if (num_ranks_ == 1) return absl::OkStatus();
  EXPERTD_CHECK(comm_ != nullptr);
  return EnqueueGroup(comm_, sends, receives, stream);
}

absl::Status NcclTransport::Check() {
  if (comm_ == nullptr) return absl::OkStatus();
  ncclResult_t error = ncclSuccess;
  if (absl::Status status = NcclStatus(ncclCommGetAsyncError(comm_, &error), "NCCL");
      !status.ok()) {
    return status;
  }
  return NcclStatus(error, "NCCL");
}

absl::Status NcclTransport::Abort() { return End(ncclCommAbort, "ncclCommAbort"); }

// Either end waits until NCCL's kernels have ended, so it has a limit.
absl::Status NcclTransport::End(ncclResult_t (*end)(ncclComm_t), const char* what) {
  if (comm_ == nullptr) return absl::OkStatus();
  auto step = std::make_shared<StepName>();
  step->Set(what);
  return RunWithin(
      absl::Milliseconds(limits::kNcclTeardownMs), absl::StrCat("rank ", rank_), step,
      [comm = std::exchange(comm_, nullptr), device = device_, end, what]() -> absl::Status {
        EXPERTD_CUDA_RETURN_IF_ERROR(cudaSetDevice(device));
        return NcclStatus(end(comm), what);
      });
}

}  // namespace expertd::cuda
