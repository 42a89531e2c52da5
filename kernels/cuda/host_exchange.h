#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "config/model_spec.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/exchange_kernels.h"
#include "kernels/cuda/exchange_plan.h"
#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/nccl_comm/communicator.h"
#include "kernels/cuda/pack_weights.h"
#include "kernels/cuda/row_transport.h"
#include "kernels/cuda/unfused_moe.h"

// The all-to-all for ranks that cannot store into each other: host-launched NCCL around the fused
// kernel, which each rank runs as if it were alone over the rows that came to it. The same step as
// the exchange inside the kernel: the same replicas, one partial row per (token, owner rank), added
// by the token's home rank in rank order.
namespace expertd::cuda {

struct HostExchangeOptions {
  ExchangeShape shape;            // the same on every rank
  PlacementTable placement;       // device memory that outlives the exchange; global slots
  int32_t num_sms = 0;            // of this rank's device
  absl::Duration limit;           // of Create, and of one step from Enqueue to Finish; the
                                  // layer kernel's waits get half of it, to speak first
  Communicator* group = nullptr;  // outlives the exchange; need not be mapped()
};

// One instance a rank, used by the rank's device thread alone (Stop apart). Every rank of the group
// calls Enqueue and Finish for every step, in the same order, zero rows included.
//
// The sizes of a step's transfers are known on the device first, so Enqueue blocks: until every
// peer's counts are on the host, at most `limit`. One step at a time is between Enqueue and Finish;
// what the caller enqueues in between (copying the output) runs behind the step.
//
// A wait that ends by its limit, or an error that NCCL reports, ends the exchange: NCCL's kernels
// are told to end, the stream is waited for (some seconds at most, otherwise the status is marked
// fatal, see kernels/fatal.h), and every later call returns the same status. The group then makes a
// new exchange on every rank, when no rank of the process is inside a call of the old one (NCCL may
// still store into a peer's buffers). A fault inside one rank's layer kernel fails the step on all
// ranks, and the next step runs.
class HostExchange {
 public:
  // Collective over the group: splits a communicator of its own off it and connects all pairs.
  // Allocates everything. DEADLINE_EXCEEDED if a peer does not come; NCCL may then hold a thread of
  // this process for good.
  static absl::StatusOr<std::unique_ptr<HostExchange>> Create(const HostExchangeOptions& options);
  // The same over another transport; options.group is not looked at.
  static absl::StatusOr<std::unique_ptr<HostExchange>> Create(
      const HostExchangeOptions& options, std::unique_ptr<RowTransport> transport);

  // Local. What was enqueued has passed, or the exchange has ended.
  ~HostExchange();

  HostExchange(const HostExchange&) = delete;
  HostExchange& operator=(const HostExchange&) = delete;

  // Device memory that an exchange takes, NCCL's included: pure.
  static int64_t DeviceBytes(const ExchangeShape& shape);

  // One layer over all ranks: `step` holds this rank's rows, `layer` this rank's slots. T up to
  // shape.max_tokens_per_rank, K up to shape.max_top_k; K may differ between ranks. `step_number`
  // and spec.layer are compared with the peers'. INVALID_ARGUMENT: nothing was enqueued, and the
  // peers will wait in vain.
  absl::Status Enqueue(const LayerSpec& spec, const PackedLayer& layer, const UnfusedStep& step,
                       uint32_t step_number, cudaStream_t stream);

  // Blocks until the GPU has passed the step. Not OK: the output means nothing, and the status
  // names the rank that was waited for or that gave up, and the step.
  absl::Status Finish();

  // Any thread: the step that runs ends soon, without an answer; later ones fail.
  void Stop();

  // For tests: the role of this rank's layer kernel that stalls in the steps from now on.
  void SetStall(moe_layer::StallPoint stall) { stall_ = stall; }

 private:
  struct HostBlock;

  HostExchange(const HostExchangeOptions& options, std::unique_ptr<RowTransport> transport);
  absl::Status Allocate();
  absl::Status CheckStep(const LayerSpec& spec, const UnfusedStep& step) const;
  absl::Status ExchangeCounts();
  absl::Status WaitForCounts();
  absl::Status ExchangeRows();
  absl::Status RunExperts(const LayerSpec& spec, const PackedLayer& layer);
  moe_layer::MoeLayerParams LayerParams(const LayerSpec& spec, const PackedLayer& layer) const;
  absl::Status ReturnPartials();
  absl::Status CheckProgress();
  absl::Status CheckFaults();
  absl::Status GiveUp(absl::Status reason);
  absl::Status Drain();
  std::string WhoIsMissing() const;
  std::string StepName() const;

  HostBlock* host() const { return host_memory_.as<HostBlock>(); }

  const HostExchangeOptions options_;
  const std::unique_ptr<RowTransport> transport_;
  ExchangeBuffers buffers_;
  layout::WorkspaceOffsets workspace_;  // the layer kernel's
  MemoryBlock device_memory_;
  MemoryBlock host_memory_;  // pinned, mapped
  Event passed_;
  std::atomic<bool> stopped_ = false;

  // of the step between Enqueue and Finish
  ExchangeStep view_;
  ExchangePlan plan_;
  cudaStream_t stream_ = nullptr;
  absl::Time deadline_;
  bool in_step_ = false;

  moe_layer::StallPoint stall_ = moe_layer::kStallNowhere;
  uint32_t kernel_step_ = 0;  // steps since the workspace was zeroed
  bool needs_reset_ = true;
  absl::Status ended_;  // not OK: the exchange is over
};

}  // namespace expertd::cuda
