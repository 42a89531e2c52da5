#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "config/server_config.h"
#include "kernels/backend.h"

namespace expertd {

using BackendFactory =
    std::function<absl::StatusOr<std::unique_ptr<Backend>>(const BackendOptions&)>;

// kAuto becomes kCuda if this build has the CUDA backend and there is a GPU it runs on, otherwise
// kCpu; why not is logged. Anything else stays as it is.
BackendKind ResolveBackend(const ServerConfig& config);

// kCpu or kCuda; in a build without CUDA the factory of kCuda fails and says so.
BackendFactory BackendFor(BackendKind kind);

}  // namespace expertd
