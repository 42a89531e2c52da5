#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/row_transport.h"

namespace expertd::testing {

// Ranks as threads of this process that copy from each other's device memory: any number of ranks
// on one GPU, without NCCL. A rank that does not come fails the others after a few seconds.
std::vector<std::unique_ptr<cuda::RowTransport>> MakeLocalTransports(int32_t num_ranks);

}  // namespace expertd::testing
