#pragma once

#include <cstdint>
#include <memory>

#include "kernels/backend.h"
#include "kernels/cpu/exchange.h"
#include "kernels/cpu/memory_limit.h"

namespace expertd::cpu {

// What MakeCpuBackend(BackendOptions) leaves at its default: a process that owns some of the ranks,
// with an exchange that reaches the others.
struct CpuBackendOptions {
  BackendOptions common;
  int32_t first_rank = 0;
  int32_t num_local_ranks = 0;         // 0 = all of the placement's
  std::shared_ptr<Exchange> exchange;  // null = in-process; then all ranks have to be local
  MemoryLimit memory_limit;            // 0 bytes = what ReadMemoryLimit finds
};

// RESOURCE_EXHAUSTED before anything is allocated if weights and workspace exceed the memory limit,
// with the largest max_tokens_per_rank that fits.
absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const CpuBackendOptions& options);

}  // namespace expertd::cpu
