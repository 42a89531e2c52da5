#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/device_thread.h"
#include "kernels/cuda/memory_plan.h"
#include "kernels/cuda/pack_weights.h"

namespace expertd::cuda {

// A layer whose weights are being loaded, or are.
struct DeviceLayer {
  LayerSpec spec;
  PackedLayer packed;
};

// Matrices go through a pool of staging buffers a rank, each pinned on the host with a twin on the
// rank's device: the loader fills the pinned half, Commit has the device thread copy and pack it,
// and when the GPU is done the buffer is free for the next matrix. Finish frees the pools.
class CudaWeightSink final : public WeightSink {
 public:
  // Where a rank's matrices go; both outlive the sink. The layers are the same on every rank.
  struct Rank {
    const std::vector<DeviceLayer>* layers = nullptr;
    DeviceThread* thread = nullptr;
  };

  // Allocates the pools on the device threads.
  static absl::StatusOr<std::unique_ptr<CudaWeightSink>> Create(
      std::vector<Rank> ranks, std::shared_ptr<const Placement> placement);
  // Frees what Finish did not; leaks what belongs to a device thread that has failed for good.
  ~CudaWeightSink() override;

  absl::StatusOr<MatrixBuffers> Reserve(const MatrixId& id, absl::Time deadline) override;
  absl::Status Commit(const MatrixId& id, float second_level) override;
  absl::Status Finish() override;

  bool finished() const;

 private:
  struct Buffer {
    MemoryBlock pinned;
    MemoryBlock device;
  };
  struct Pool {
    Rank rank;
    std::vector<Buffer> buffers;
    std::vector<int32_t> free;  // guarded by mutex_
  };
  enum class State { kReserved, kCommitted };
  struct Entry {
    State state = State::kReserved;
    int32_t buffer = -1;  // while kReserved
  };
  using Key = std::tuple<int32_t, int32_t, int32_t, Matrix>;  // rank, layer, slot, matrix

  CudaWeightSink(std::vector<Rank> ranks, std::shared_ptr<const Placement> placement);

  absl::Status Allocate(Pool* pool) const;
  absl::Status FreeBuffers();

  const DeviceLayer* Find(const MatrixId& id) const;
  absl::Status Check(const MatrixId& id) const;
  absl::Status CopyAndPack(const MatrixId& id, float second_level, int32_t buffer,
                           cudaStream_t stream) const;
  void Packed(int32_t rank, int32_t buffer, const absl::Status& status);
  std::vector<std::string> Missing() const;

  const std::shared_ptr<const Placement> placement_;
  StagingLayout layout_;
  std::vector<Pool> pools_;  // [ranks]

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a buffer came back
  std::map<Key, Entry> entries_;     // guarded by mutex_, as what follows
  int32_t packing_ = 0;              // buffers on the device threads
  absl::Status failure_;             // the first
  bool finished_ = false;
};

}  // namespace expertd::cuda
