#include "kernels/cpu/weight_store.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/check.h"

namespace expertd::cpu {
namespace {

constexpr int kMaxListed = 20;  // missing matrices named in Finish's message; the rest are counted

std::string Describe(const MatrixId& id) {
  return absl::StrCat("rank ", id.rank, " layer ", id.layer, " slot ", id.slot, " ",
                      std::string(MatrixName(id.matrix)));
}

}  // namespace

WeightStore::WeightStore(std::vector<LayerSpec> layers, std::shared_ptr<const Placement> placement,
                         int32_t first_rank, int32_t num_ranks)
    : layers_(std::move(layers)),
      placement_(std::move(placement)),
      first_rank_(first_rank),
      num_ranks_(num_ranks),
      cells_(static_cast<size_t>(num_ranks) * layers_.size() * placement_->slots_per_rank() *
             kNumMatrices) {
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      bytes_ += static_cast<int64_t>(PlaceCells(rank, static_cast<int32_t>(layer), nullptr));
    }
  }
}

absl::Status WeightStore::Map() {
  EXPERTD_CHECK(memory_.empty());
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    for (size_t i = 0; i < layers_.size(); ++i) {
      const auto layer = static_cast<int32_t>(i);
      auto memory = MappedMemory::Create(PlaceCells(rank, layer, nullptr), "weights");
      if (!memory.ok()) return memory.status();
      PlaceCells(rank, layer, memory->data());
      memory_.push_back(*std::move(memory));
    }
  }
  return absl::OkStatus();
}

// Returns the bytes of the (rank, layer); with a base also sets the cells.
size_t WeightStore::PlaceCells(int32_t rank, int32_t layer_index, uint8_t* base) {
  const LayerSpec& spec = layers_[layer_index];
  Carver carver(base);
  for (int32_t slot = 0; slot < placement_->slots_per_rank(); ++slot) {
    if (placement_->ExpertAt(first_rank_ + rank, slot) < 0) continue;
    for (int m = 0; m < kNumMatrices; ++m) {
      const auto matrix = static_cast<Matrix>(m);
      Cell& cell = cells_[CellIndex(rank, layer_index, slot, matrix)];
      cell.state = State::kEmpty;
      cell.shape = ShapeOf(spec, matrix);
      cell.codes = carver.Take<uint8_t>(cell.shape.CodeBytes() + kReadPadding);
      cell.scales = carver.Take<uint8_t>(cell.shape.ScaleBytes(spec.recipe) + kReadPadding);
      cell.view = {cell.codes, cell.scales, cell.shape.in, spec.recipe, 1.0f};
    }
  }
  return carver.used();
}

int32_t WeightStore::LayerIndex(int32_t layer) const {
  const auto it = std::lower_bound(layers_.begin(), layers_.end(), layer,
                                   [](const LayerSpec& spec, int32_t l) { return spec.layer < l; });
  if (it == layers_.end() || it->layer != layer) return -1;
  return static_cast<int32_t>(it - layers_.begin());
}

absl::StatusOr<WeightStore::Cell*> WeightStore::FindCell(const MatrixId& id) {
  const int32_t layer_index = LayerIndex(id.layer);
  if (layer_index < 0 || id.rank < 0 || id.rank >= num_ranks_ || id.slot < 0 ||
      id.slot >= placement_->slots_per_rank()) {
    return absl::InvalidArgumentError(absl::StrCat("no such matrix: ", Describe(id)));
  }
  Cell* cell = &cells_[CellIndex(id.rank, layer_index, id.slot, id.matrix)];
  if (cell->state == State::kAbsent) {
    return absl::InvalidArgumentError(absl::StrCat("no expert is placed at ", Describe(id)));
  }
  return cell;
}

absl::StatusOr<MatrixBuffers> WeightStore::Reserve(const MatrixId& id, absl::Time) {
  auto cell = FindCell(id);
  if (!cell.ok()) return cell.status();
  State expected = State::kEmpty;
  if (finished() || !(*cell)->state.compare_exchange_strong(expected, State::kReserved)) {
    return absl::FailedPreconditionError(absl::StrCat("reserved twice: ", Describe(id)));
  }
  const Cell& c = **cell;
  return MatrixBuffers{{c.codes, static_cast<size_t>(c.shape.CodeBytes())},
                       {c.scales, static_cast<size_t>(c.shape.ScaleBytes(c.view.recipe))}};
}

absl::Status WeightStore::Commit(const MatrixId& id, float second_level) {
  auto found = FindCell(id);
  if (!found.ok()) return found.status();
  Cell& cell = **found;
  if (cell.state != State::kReserved) {
    return absl::FailedPreconditionError(absl::StrCat("not reserved: ", Describe(id)));
  }
  if (!std::isfinite(second_level) || second_level <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(Describe(id), ": second-level scale is ",
                                                   second_level, ", must be finite and positive"));
  }
  cell.view.second_level = second_level;
  cell.state.store(State::kCommitted, std::memory_order_release);
  return absl::OkStatus();
}

absl::Status WeightStore::Finish() {
  std::string missing;
  int64_t num_missing = 0;
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    for (const LayerSpec& spec : layers_) {
      for (int32_t slot = 0; slot < placement_->slots_per_rank(); ++slot) {
        for (int m = 0; m < kNumMatrices; ++m) {
          const MatrixId id{rank, spec.layer, slot, static_cast<Matrix>(m)};
          const State state =
              cells_[CellIndex(rank, LayerIndex(spec.layer), slot, id.matrix)].state;
          if (state == State::kAbsent || state == State::kCommitted) continue;
          if (++num_missing > kMaxListed) continue;
          absl::StrAppend(&missing, missing.empty() ? "" : "; ", Describe(id), " (expert ",
                          placement_->ExpertAt(first_rank_ + rank, slot), ")");
        }
      }
    }
  }
  if (num_missing > 0) {
    return absl::FailedPreconditionError(absl::StrCat(num_missing,
                                                      " matrices were not loaded: ", missing,
                                                      num_missing > kMaxListed ? "; ..." : ""));
  }
  finished_.store(true, std::memory_order_release);
  return absl::OkStatus();
}

}  // namespace expertd::cpu
