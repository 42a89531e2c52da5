#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/nccl_comm/device_checks.h"

// Asks CUDA and NVML about this machine, for device_checks to judge.
namespace expertd::cuda {

// Of the current device and this process. `nccl` is left to the caller.
absl::StatusOr<RankFacts> ProbeThisRank();

// Empty if the current device can load from and store to the memory of `peer`, or if nobody here
// knows; otherwise who says no. A peer that CUDA_VISIBLE_DEVICES hides is looked up by its bus id
// in NVML, which sees every device of the host.
std::string WhyNoPeerAccess(const RankFacts& self, const RankFacts& peer);

}  // namespace expertd::cuda
