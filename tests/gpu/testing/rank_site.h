#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/comm/peer.h"

namespace expertd::cuda {
class Communicator;
}

namespace expertd::testing {

enum class RankMode {
  kSameDevice,  // every rank on device 0, each with its share of the SMs: needs one GPU and no NCCL
  kDeviceEach,  // rank r on device r, workspaces in NCCL's symmetric window
};
std::string RankModeName(RankMode mode);

// Where the ranks of a group run and where their workspaces lie. Used by tests and by the
// benchmark; owned and called by one thread.
class RankSite {
 public:
  using Work = std::function<absl::Status(int rank, cudaStream_t stream)>;
  using StepWork = std::function<absl::Status(int rank, int index, cudaStream_t stream)>;

  // UNAVAILABLE where this machine cannot: too few GPUs, or GPUs that are not mapped into each
  // other. Workspaces are zero.
  static absl::StatusOr<std::unique_ptr<RankSite>> Open(RankMode mode, int num_ranks,
                                                        int64_t workspace_bytes);
  // The ranks' kernels have ended.
  virtual ~RankSite() = default;

  RankSite(const RankSite&) = delete;
  RankSite& operator=(const RankSite&) = delete;

  // work(rank, its stream) for every rank, its device current: one rank after the other on this
  // thread (kSameDevice), or all at the same time, a thread each. Returns when every call has
  // returned, with the first error in rank order. The streams do not wait for the legacy stream.
  virtual absl::Status ForEach(const Work& work) = 0;

  // work(rank, index, stream) for index 0 .. count - 1 and every rank; each rank in order. Ranks
  // with a thread of their own do not wait for each other; those on one thread take turns, so that
  // no rank's launch waits for room in its queue while a peer's earlier launch is missing.
  virtual absl::Status ForEachStep(int count, const StepWork& work) = 0;

  // Waits until every stream has passed what was enqueued; the kernels' own limits bound it.
  absl::Status Synchronise();

  // The rank's membership of the group, null with kSameDevice.
  virtual cuda::Communicator* communicator(int /*rank*/) { return nullptr; }

  int num_ranks() const { return num_ranks_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }
  // Workspaces of all ranks as `rank` addresses them.
  const cuda::PeerMap& peers(int rank) const { return peers_[rank]; }
  cudaStream_t stream(int rank) const { return streams_[rank]; }
  // CTAs that a rank's kernel may have so that the kernels of all ranks are resident together.
  int num_ctas() const { return num_ctas_; }

 protected:
  RankSite(int num_ranks, int64_t workspace_bytes)
      : num_ranks_(num_ranks),
        workspace_bytes_(workspace_bytes),
        peers_(num_ranks),
        streams_(num_ranks) {}

  const int num_ranks_;
  const int64_t workspace_bytes_;
  int num_ctas_ = 0;
  std::vector<cuda::PeerMap> peers_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace expertd::testing
