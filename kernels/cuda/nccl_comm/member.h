#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/cuda/comm/peer.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/nccl_comm/device_checks.h"
#include "kernels/cuda/nccl_comm/device_communicator.h"
#include "kernels/cuda/nccl_comm/watchdog.h"

namespace expertd::cuda {

// Where the parts of a window's memory lie.
struct WindowPlan {
  int64_t window_bytes = 0;  // from the start
  int64_t flags_offset = 0;  // the self-test's flags
  int64_t memory_bytes = 0;  // of both, in units of what can be mapped elsewhere
};
WindowPlan PlanWindow(int64_t window_bytes, int32_t num_ranks);

// What a Communicator does, without its watchdog: every call blocks, and is made on whatever thread
// the watchdog runs, one at a time, with the device current. Collective calls return within the
// deadline unless CUDA or NCCL itself does not return.
class Member {
 public:
  Member(const ncclUniqueId& id, int32_t rank, int32_t num_ranks, std::shared_ptr<StepName> step);

  // Collective.
  absl::Status Connect(absl::Time deadline);
  absl::Status OpenWindow(int64_t bytes, absl::Time deadline);
  absl::Status SelfTest(cudaStream_t test_stream, absl::Time deadline);

  // Local. Nothing is freed without TearDown.
  absl::Status Abort();
  void TearDown(bool abort);

  // Of the collective calls that are done.
  const std::string& why_not_mapped() const { return why_not_mapped_; }
  const PeerMap& peers() const { return peers_; }
  int64_t window_bytes() const { return plan_.window_bytes; }
  ncclComm_t comm() const { return comm_; }

 private:
  bool alone() const { return num_ranks_ == 1; }
  absl::Status Prepare();
  absl::Status Init(absl::Time deadline);
  absl::StatusOr<std::string> FindWhyNotMapped(absl::Time deadline);
  absl::Status CheckPeerAccess() const;
  absl::StatusOr<std::string> MakeDeviceCommunicator(absl::Time deadline);
  absl::Status AllocateWindow();
  absl::Status MapWindow(absl::Time deadline);

  // Every rank learns every rank's record.
  template <typename Record>
  absl::StatusOr<std::vector<Record>> Gather(const Record& mine, absl::Time deadline);
  // The same status on all ranks: OK if it is everywhere.
  absl::Status Agree(const absl::Status& mine, absl::Time deadline);
  template <typename Record>
  int64_t ScratchBytes() const {
    return num_ranks_ * static_cast<int64_t>(sizeof(Record));
  }

  const ncclUniqueId id_;
  const int32_t rank_;
  const int32_t num_ranks_;
  const std::shared_ptr<StepName> step_;

  ncclComm_t comm_ = nullptr;
  std::vector<RankFacts> facts_;  // by rank
  std::string why_not_mapped_;
  std::unique_ptr<DeviceCommunicator> device_communicator_;

  cudaStream_t stream_ = nullptr;
  MemoryBlock device_scratch_;  // a record of every rank
  MemoryBlock host_scratch_;

  MemoryBlock own_memory_;       // the window of one rank
  void* nccl_memory_ = nullptr;  // the window of several
  ncclWindow_t window_ = nullptr;
  PeerMap peers_;
  WindowPlan plan_;
  uint32_t self_test_round_ = 0;
};

}  // namespace expertd::cuda
