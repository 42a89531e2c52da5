#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace expertd {

// The step memories of a backend: how a rank's part is cut, and which are free. The bytes are the
// backend's, for it knows of what kind they must be. Any thread.
class StepMemoryPool {
 public:
  struct Shape {
    int32_t max_tokens = 0;  // T, rows of a rank
    int64_t hidden_size = 0;
  };
  // Of one rank's part of one step memory; a multiple of 64.
  static int64_t RankBytes(const Shape& shape);

  // parts: [step memories][ranks], each of RankBytes from an address that is a multiple of 64. They
  // outlive the pool.
  StepMemoryPool(const Shape& shape, absl::Span<const std::vector<uint8_t*>> parts);

  // RESOURCE_EXHAUSTED if none becomes free before `deadline`.
  absl::StatusOr<StepMemory*> Acquire(absl::Time deadline);
  void Release(StepMemory* memory);

 private:
  struct Entry {
    StepMemory memory;
    bool free = true;  // guarded by mutex_
  };

  std::mutex mutex_;
  std::condition_variable released_;  // Acquire waits for a free memory
  std::vector<Entry> entries_;
};

}  // namespace expertd
