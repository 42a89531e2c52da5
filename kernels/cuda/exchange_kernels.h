#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/exchange_plan.h"
#include "kernels/cuda/unfused_moe.h"

// The kernels of the host-launched exchange, one small launch each, in this order in a step:
//   FindOwners    positions and counts: which tokens go to which rank
//   PackRows      after the counts came: tells the host, and writes the outgoing blocks
//   SpreadRoutes  after the rows came: records to the layer kernel's ids and weights
//   SealPartials  after the layer kernel: did it complete
//   SumPartials   after the partial rows came: the output
// All are deterministic and wait for nothing.
namespace expertd::cuda {

// In pinned memory that the GPU writes and the host polls. `step` last.
struct ExchangeNotice {
  ExchangeHeader sent[kMaxExchangeRanks];
  ExchangeHeader received[kMaxExchangeRanks];
  ExchangeTag tags[kMaxExchangeRanks];  // beside the partial rows that came back
  uint32_t step;                        // whose headers these are
};

// Views of ExchangeLayout's arrays.
struct ExchangeBuffers {
  ExchangeHeader* sent = nullptr;
  ExchangeHeader* received = nullptr;
  int32_t* positions = nullptr;
  void* peer_rows = nullptr;
  RouteRecord* peer_routes = nullptr;
  uint16_t* rows = nullptr;
  RouteRecord* routes = nullptr;
  int32_t* ids = nullptr;
  float* weights = nullptr;
  void* partials = nullptr;
  ExchangeTag* tag = nullptr;
  ExchangeTag* peer_tags = nullptr;
  int32_t* first_slot = nullptr;
  int32_t* slots = nullptr;
  char* workspace = nullptr;
};
ExchangeBuffers BuffersOf(const ExchangeLayout& layout, void* base);

// Everything the kernels need of a step; addresses of the device.
struct ExchangeStep {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  int32_t slots_per_rank = 0;
  int32_t hidden_size = 0;  // multiple of 64
  bool partials_bf16 = false;
  uint32_t step = 0;
  int32_t layer = 0;
  UnfusedStep own;  // this rank's rows and output
  PlacementTable placement;
  ExchangeBuffers buffers;
  ExchangeNotice* notice = nullptr;
};

// Loads the kernels, so that no launch does while a peer's kernel waits.
absl::Status LoadExchangeKernels();

absl::Status LaunchFindOwners(const ExchangeStep& step, cudaStream_t stream);
absl::Status LaunchPackRows(const ExchangeStep& step, cudaStream_t stream);
// `rows` and `top_k` as in ExchangePlan.
absl::Status LaunchSpreadRoutes(const ExchangeStep& step, int64_t rows, int32_t top_k,
                                cudaStream_t stream);
// `fault`: the layer kernel's record, or null if it did not run.
absl::Status LaunchSealPartials(const ExchangeStep& step, const uint32_t* fault,
                                cudaStream_t stream);
absl::Status LaunchSumPartials(const ExchangeStep& step, cudaStream_t stream);

}  // namespace expertd::cuda
