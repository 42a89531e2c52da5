#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "config/cluster_spec.h"
#include "kernels/cuda/host_exchange.h"
#include "kernels/cuda/nccl_comm/communicator.h"
#include "tests/gpu/testing/device.h"
#include "tests/gpu/testing/moe_cases.h"
#include "tests/gpu/testing/rank_group.h"

namespace expertd::testing {

struct ExchangeRanksOptions {
  bool nccl = false;  // rank r on device r through NCCL; otherwise all on device 0 by copies
  int32_t max_tokens = 0;
  int32_t max_top_k = 0;
  bool partials_bf16 = false;
  absl::Duration limit = absl::Seconds(20);
  // Puts something in front of a rank's transport.
  std::function<std::unique_ptr<cuda::RowTransport>(int, std::unique_ptr<cuda::RowTransport>)> wrap;
};

// One rank with what it needs to run a layer through the host-launched exchange. Made, used and
// freed on one thread at a time, its device current.
class ExchangeRank {
 public:
  ExchangeRank(const HostLayer& layer, const Placement& placement, int rank,
               const ExchangeRanksOptions& options);
  ~ExchangeRank();

  // `group` or `transport`; collective.
  absl::Status Open(cuda::Communicator* group, std::unique_ptr<cuda::RowTransport> transport);
  void Close() { exchange_.reset(); }
  // The rank's rows of the step as they lie in memory; they start as NaN.
  absl::StatusOr<std::vector<uint8_t>> Run(const HostBatch& batch, uint32_t step, DType output);

  cuda::HostExchange& exchange() { return *exchange_; }

 private:
  const LayerSpec spec_;
  const cuda::ExchangeShape shape_;
  const absl::Duration limit_;
  PackedOnDevice packed_;
  DevicePlacement placement_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<cuda::HostExchange> exchange_;
};

// All ranks of a layer as threads of this process.
class ExchangeRanks {
 public:
  struct Step {
    RankOutputs outputs;                 // by rank; empty where its status is not OK
    std::vector<absl::Status> statuses;  // by rank
    std::vector<absl::Duration> took;    // by rank
  };

  static absl::StatusOr<std::unique_ptr<ExchangeRanks>> Make(const HostLayer& layer,
                                                             const Placement& placement,
                                                             const ExchangeRanksOptions& options);
  ~ExchangeRanks();

  // One step of all ranks. An error fails the test.
  RankOutputs Run(const RankBatches& batches, DType output = DType::kBf16);
  // One step that may fail: of the ranks for which `comes` is true, with the step number of
  // `number_of`.
  Step TryRun(const RankBatches& batches, const std::function<bool(int)>& comes,
              const std::function<uint32_t(int)>& number_of);
  uint32_t next_step() const { return step_ + 1; }

  // A new exchange on every rank of the same group.
  absl::Status Reopen();

  int num_ranks() const { return num_ranks_; }
  cuda::HostExchange& exchange(int rank) { return ranks_[rank]->exchange(); }

 private:
  ExchangeRanks(int num_ranks, const ExchangeRanksOptions& options);
  // body(rank) on a thread each, the rank's device current.
  void ForEach(const std::function<void(int)>& body) const;
  absl::Status Open();

  const int num_ranks_;
  const ExchangeRanksOptions options_;
  std::vector<std::unique_ptr<cuda::Communicator>> communicators_;
  std::vector<std::unique_ptr<ExchangeRank>> ranks_;
  uint32_t step_ = 0;
};

}  // namespace expertd::testing
