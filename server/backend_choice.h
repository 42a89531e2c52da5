#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "config/server_config.h"
#include "kernels/backend.h"

namespace expertd {

using BackendFactory =
    std::function<absl::StatusOr<std::unique_ptr<Backend>>(const BackendOptions&)>;

// What the machine decides: backend kCpu or kCuda, the number of ranks, and with CUDA one device a
// rank. kAuto becomes kCuda if this build has the CUDA backend and there are GPUs that it runs on,
// otherwise kCpu, unless devices are named; why not is logged. An error says what was asked for
// that is not there: exit_codes::kUsage.
absl::StatusOr<ServerConfig> ResolveBackend(const ServerConfig& config);

// kCpu or kCuda; in a build without CUDA the factory of kCuda fails and says so.
BackendFactory BackendFor(BackendKind kind);

}  // namespace expertd
