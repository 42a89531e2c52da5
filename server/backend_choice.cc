#include "server/backend_choice.h"

#include <string>

#include "spdlog/spdlog.h"
#ifdef EXPERTD_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace expertd {
namespace {

#ifndef EXPERTD_HAVE_CUDA
constexpr char kNoCuda[] = "this build has no CUDA backend";

absl::Status CheckCudaDevice(const std::vector<int32_t>&) { return absl::NotFoundError(kNoCuda); }

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const BackendOptions&) {
  return absl::FailedPreconditionError(std::string("backend: ") + kNoCuda);
}
#endif

}  // namespace

BackendKind ResolveBackend(const ServerConfig& config) {
  if (config.backend != BackendKind::kAuto) return config.backend;
  const absl::Status found = CheckCudaDevice(config.devices);
  if (found.ok()) return BackendKind::kCuda;
  spdlog::info("backend: cpu ({})", std::string(found.message()));
  return BackendKind::kCpu;
}

BackendFactory BackendFor(BackendKind kind) {
  if (kind == BackendKind::kCpu) return MakeCpuBackend;
  return [](const BackendOptions& options) { return MakeCudaBackend(options); };
}

}  // namespace expertd
