#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

// Which GPUs a process uses: one rank a device. Creates no context.
namespace expertd::cuda {

struct DeviceInfo {
  int32_t device = 0;
  int32_t num_sms = 0;  // that kernels use: of the smallest device, for all ranks' grids are equal
  std::string description;  // for people
};

// The pure part: `devices` as they are, or the first `ranks` (0: all) of the visible ones.
// INVALID_ARGUMENT if fewer are visible than ranks are asked for, for a device that does not exist
// or comes twice, and if there are not as many devices as ranks.
absl::StatusOr<std::vector<int32_t>> ChooseDevices(absl::Span<const int32_t> devices, int32_t ranks,
                                                   int32_t visible);

// The same on this machine, and whether the kernels can run there: FAILED_PRECONDITION where no
// device is visible, and for an architecture that names the device.
absl::StatusOr<std::vector<DeviceInfo>> FindDevices(absl::Span<const int32_t> devices,
                                                    int32_t ranks);

}  // namespace expertd::cuda
