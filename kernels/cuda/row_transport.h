#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace expertd::cuda {

// Bytes of device memory that go to a peer or come from it.
struct Transfer {
  int32_t peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// Moves blocks between the ranks of a group in stream order. One instance a rank, used by one
// thread.
class RowTransport {
 public:
  virtual ~RowTransport() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t num_ranks() const = 0;

  // Enqueues one exchange; every rank calls it equally often. The n-th transfer to a peer meets its
  // n-th from here, of the same size; empty ones are left out on both sides. Peers are not waited
  // for.
  virtual absl::Status Exchange(absl::Span<const Transfer> sends,
                                absl::Span<const Transfer> receives, cudaStream_t stream) = 0;

  // What went wrong since it was asked last, e.g. a peer's connection that broke.
  virtual absl::Status Check() = 0;

  // Tells all that is enqueued to end; afterwards only destruction is left. Bounded: not OK (fatal)
  // if it does not return in time.
  virtual absl::Status Abort() = 0;
};

}  // namespace expertd::cuda
