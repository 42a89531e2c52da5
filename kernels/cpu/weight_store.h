#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/fp4_gemm.h"
#include "kernels/cpu/mapped_memory.h"

namespace expertd::cpu {

// The weights of a process's ranks in the file's layout: one block of memory a (rank, layer), in it
// slot by slot gate, up, down, each codes then scales. Reserve returns the final memory, so the
// loader reads files straight into place. Loader threads write until Finish; afterwards it is read
// only.
class WeightStore final : public WeightSink {
 public:
  // Ranks [first_rank, first_rank + num_ranks) of the placement. bytes() is known from here on.
  WeightStore(std::vector<LayerSpec> layers, std::shared_ptr<const Placement> placement,
              int32_t first_rank, int32_t num_ranks);

  // Maps the memory; once, before the first Reserve.
  absl::Status Map();

  // Never blocks; the deadline is not needed.
  absl::StatusOr<MatrixBuffers> Reserve(const MatrixId& id, absl::Time deadline) override;
  absl::Status Commit(const MatrixId& id, float second_level) override;
  absl::Status Finish() override;

  bool finished() const { return finished_.load(std::memory_order_acquire); }
  int64_t bytes() const { return bytes_; }
  const std::vector<LayerSpec>& layers() const { return layers_; }
  int32_t LayerIndex(int32_t layer) const;  // -1 if not served

  const Fp4Matrix& Get(int32_t rank, int32_t layer_index, int32_t slot, Matrix matrix) const {
    return cells_[CellIndex(rank, layer_index, slot, matrix)].view;
  }

 private:
  enum class State : uint8_t { kAbsent, kEmpty, kReserved, kCommitted };  // absent: no expert there

  struct Cell {
    std::atomic<State> state{State::kAbsent};
    Fp4Matrix view;
    MatrixShape shape;
    uint8_t* codes = nullptr;
    uint8_t* scales = nullptr;
  };

  size_t CellIndex(int32_t rank, int32_t layer_index, int32_t slot, Matrix matrix) const {
    return ((static_cast<size_t>(rank) * layers_.size() + layer_index) *
                placement_->slots_per_rank() +
            slot) *
               kNumMatrices +
           static_cast<size_t>(matrix);
  }
  size_t PlaceCells(int32_t rank, int32_t layer_index, uint8_t* base);
  absl::StatusOr<Cell*> FindCell(const MatrixId& id);

  const std::vector<LayerSpec> layers_;
  const std::shared_ptr<const Placement> placement_;
  const int32_t first_rank_;
  const int32_t num_ranks_;
  int64_t bytes_ = 0;
  std::vector<MappedMemory> memory_;  // [num_ranks * layers]
  std::vector<Cell> cells_;           // [num_ranks][layers][slots][matrices]
  std::atomic<bool> finished_{false};
};

}  // namespace expertd::cpu
