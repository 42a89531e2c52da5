#pragma once

#include <nccl.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/cuda/nccl_comm/communicator.h"
#include "kernels/cuda/row_transport.h"

namespace expertd::cuda {

// Blocks through host-launched NCCL sends and receives, over a communicator of its own: a step that
// is given up aborts this one, and the group's stays. It is a blocking one, because NCCL starts a
// thread for every group of calls on one that is not; blocking calls that could meet a lost peer
// happen in Create alone.
class NcclTransport : public RowTransport {
 public:
  // Collective: splits `group` and connects all pairs, at most `limit` each. On failure the group
  // is given up too (Communicator::Abort). One rank makes no NCCL call.
  static absl::StatusOr<std::unique_ptr<NcclTransport>> Create(Communicator* group,
                                                               absl::Duration limit,
                                                               cudaStream_t stream);
  ~NcclTransport() override;

  int32_t rank() const override { return rank_; }
  int32_t num_ranks() const override { return num_ranks_; }
  absl::Status Exchange(absl::Span<const Transfer> sends, absl::Span<const Transfer> receives,
                        cudaStream_t stream) override;
  absl::Status Check() override;
  absl::Status Abort() override;

 private:
  NcclTransport(int32_t rank, int32_t num_ranks) : rank_(rank), num_ranks_(num_ranks) {}
  absl::Status Split(Communicator* group, absl::Duration limit);
  absl::Status Connect(absl::Duration limit, cudaStream_t stream);
  absl::Status End(ncclResult_t (*end)(ncclComm_t), const char* what);

  const int32_t rank_;
  const int32_t num_ranks_;
  int device_ = 0;
  ncclComm_t comm_ = nullptr;  // null for one rank, and when it has ended
};

}  // namespace expertd::cuda
