#include "kernels/cuda/device_choice.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kernel_config.h"

namespace expertd::cuda {
namespace {

absl::StatusOr<int32_t> CountVisible() {
  int count = 0;
  const absl::Status counted = EXPERTD_CUDA_STATUS(cudaGetDeviceCount(&count));
  if (absl::IsNotFound(counted)) {
    return absl::FailedPreconditionError(
        absl::StrCat("no CUDA device is usable: ", counted.message()));
  }
  if (!counted.ok()) return counted;
  if (count == 0) return absl::FailedPreconditionError("no CUDA device is visible");
  return count;
}

absl::StatusOr<DeviceInfo> Examine(int32_t device) {
  cudaDeviceProp properties = {};
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, device));
  const absl::Status suited =
      CheckDevice(properties.major, properties.minor, properties.sharedMemPerBlockOptin);
  if (!suited.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("device ", device, " (", properties.name, "): ", suited.message()));
  }
  return DeviceInfo{
      device, properties.multiProcessorCount,
      absl::StrCat("device ", device, ": ", properties.name, ", ", properties.multiProcessorCount,
                   " SMs, ", properties.totalGlobalMem >> 20, " MiB")};
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> ChooseDevices(absl::Span<const int32_t> devices, int32_t ranks,
                                                   int32_t visible) {
  if (devices.empty()) {
    if (ranks > visible) {
      return absl::InvalidArgumentError(absl::StrCat(
          "ranks: found ", ranks, ", expected at most one a visible GPU (", visible, ")"));
    }
    std::vector<int32_t> first(ranks == 0 ? visible : ranks);
    std::iota(first.begin(), first.end(), 0);
    return first;
  }
  std::set<int32_t> seen;
  for (const int32_t device : devices) {
    if (device < 0 || device >= visible) {
      return absl::InvalidArgumentError(
          absl::StrCat("device ", device, " does not exist: ", visible, " visible"));
    }
    if (!seen.insert(device).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("device ", device, " is named twice, expected one rank a device"));
    }
  }
  if (ranks != 0 && ranks != static_cast<int32_t>(devices.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("devices: found ", devices.size(), ", expected one a rank (", ranks, ")"));
  }
  return std::vector<int32_t>(devices.begin(), devices.end());
}

absl::StatusOr<std::vector<DeviceInfo>> FindDevices(absl::Span<const int32_t> devices,
                                                    int32_t ranks) {
  const absl::StatusOr<int32_t> visible = CountVisible();
  if (!visible.ok()) return visible.status();
  const absl::StatusOr<std::vector<int32_t>> chosen = ChooseDevices(devices, ranks, *visible);
  if (!chosen.ok()) return chosen.status();
  std::vector<DeviceInfo> found;
  for (const int32_t device : *chosen) {
    absl::StatusOr<DeviceInfo> info = Examine(device);
    if (!info.ok()) return info.status();
    found.push_back(*std::move(info));
  }
  int32_t num_sms = std::numeric_limits<int32_t>::max();
  for (const DeviceInfo& info : found) num_sms = std::min(num_sms, info.num_sms);
  for (DeviceInfo& info : found) info.num_sms = num_sms;
  return found;
}

}  // namespace expertd::cuda
