#include "server/backend_choice.h"

#include <algorithm>
#include <string>
#include <utility>

#include "spdlog/spdlog.h"
#ifdef EXPERTD_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace expertd {
namespace {

#ifndef EXPERTD_HAVE_CUDA
constexpr char kNoCuda[] = "this build has no CUDA backend";

absl::StatusOr<std::vector<int32_t>> FindCudaDevices(const std::vector<int32_t>&, int32_t) {
  return absl::FailedPreconditionError(kNoCuda);
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const BackendOptions&) {
  return absl::FailedPreconditionError(std::string("backend: ") + kNoCuda);
}
#endif

}  // namespace

absl::StatusOr<ServerConfig> ResolveBackend(const ServerConfig& config) {
  ServerConfig resolved = config;
  if (config.backend != BackendKind::kCpu) {
    absl::StatusOr<std::vector<int32_t>> devices = FindCudaDevices(config.devices, config.ranks);
    if (devices.ok()) {
      resolved.backend = BackendKind::kCuda;
      resolved.ranks = static_cast<int32_t>(devices->size());
      resolved.devices = *std::move(devices);
      return resolved;
    }
    // Without a usable GPU the CPU serves; GPUs that were asked for are not replaced.
    const bool asked = config.backend == BackendKind::kCuda || !config.devices.empty();
    if (asked || !absl::IsFailedPrecondition(devices.status())) {
      return absl::Status(devices.status().code(),
                          "backend: " + std::string(devices.status().message()));
    }
    spdlog::info("backend: cpu ({})", std::string(devices.status().message()));
  }
  resolved.backend = BackendKind::kCpu;
  resolved.ranks = std::max(1, config.ranks);
  resolved.devices.clear();
  return resolved;
}

BackendFactory BackendFor(BackendKind kind) {
  if (kind == BackendKind::kCpu) return MakeCpuBackend;
  return [](const BackendOptions& options) { return MakeCudaBackend(options); };
}

}  // namespace expertd
