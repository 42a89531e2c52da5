#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "config/check.h"
#include "config/cluster_spec.h"
#include "config/model_spec.h"
#include "kernels/backend.h"

namespace expertd::testing {

// A WeightSink that keeps the canonical matrices, for tests that look at what was loaded or that
// feed the reference. Ranks count from 0 = `first_rank` of the placement. Thread-safe as WeightSink
// asks; Get only after the load.
class MemorySink : public WeightSink {
 public:
  struct StoredMatrix {
    std::vector<uint8_t> codes;   // [out, in/2]
    std::vector<uint8_t> scales;  // [out, in/group]
    float second_level = 0;
    bool committed = false;
  };

  MemorySink(std::vector<LayerSpec> layers, Placement placement, int32_t first_rank = 0,
             int32_t num_ranks = 1)
      : layers_(std::move(layers)),
        placement_(std::move(placement)),
        first_rank_(first_rank),
        num_ranks_(num_ranks) {}

  absl::StatusOr<MatrixBuffers> Reserve(const MatrixId& id, absl::Time /*deadline*/) override {
    const LayerSpec* spec = FindLayer(id.layer);
    if (spec == nullptr) return absl::NotFoundError(absl::StrCat("no ", Name(id)));
    const MatrixShape shape = ShapeOf(*spec, id.matrix);
    StoredMatrix* matrix;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto [it, inserted] = matrices_.try_emplace(Key(id));
      if (!inserted) return absl::AlreadyExistsError(absl::StrCat("reserved twice: ", Name(id)));
      matrix = &it->second;  // the map's nodes stay where they are
    }
    matrix->codes.resize(static_cast<size_t>(shape.CodeBytes()));
    matrix->scales.resize(static_cast<size_t>(shape.ScaleBytes(spec->recipe)));
    return MatrixBuffers{absl::MakeSpan(matrix->codes), absl::MakeSpan(matrix->scales)};
  }

  absl::Status Commit(const MatrixId& id, float second_level) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = matrices_.find(Key(id));
    if (it == matrices_.end() || it->second.committed) {
      return absl::FailedPreconditionError(absl::StrCat("not reserved or done: ", Name(id)));
    }
    it->second.second_level = second_level;
    it->second.committed = true;
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const LayerSpec& spec : layers_) {
      for (int32_t rank = 0; rank < num_ranks_; ++rank) {
        for (int32_t slot = 0; slot < placement_.slots_per_rank(); ++slot) {
          if (placement_.ExpertAt(first_rank_ + rank, slot) < 0) continue;
          for (int m = 0; m < kNumMatrices; ++m) {
            const MatrixId id{rank, spec.layer, slot, static_cast<Matrix>(m)};
            const auto it = matrices_.find(Key(id));
            if (it == matrices_.end() || !it->second.committed) {
              return absl::FailedPreconditionError(absl::StrCat("missing: ", Name(id)));
            }
          }
        }
      }
    }
    finished_ = true;
    return absl::OkStatus();
  }

  // A committed matrix; the test has a mistake if there is none.
  const StoredMatrix& Get(const MatrixId& id) const {
    const auto it = matrices_.find(Key(id));
    EXPERTD_CHECK(it != matrices_.end() && it->second.committed);
    return it->second;
  }

  size_t num_matrices() const { return matrices_.size(); }
  bool finished() const { return finished_; }
  const std::vector<LayerSpec>& layers() const { return layers_; }
  const Placement& placement() const { return placement_; }

 private:
  using KeyType = std::tuple<int32_t, int32_t, int32_t, int>;

  static KeyType Key(const MatrixId& id) {
    return {id.rank, id.layer, id.slot, static_cast<int>(id.matrix)};
  }
  static std::string Name(const MatrixId& id) {
    return absl::StrCat("rank ", id.rank, " layer ", id.layer, " slot ", id.slot, " matrix ",
                        static_cast<int>(id.matrix));
  }
  const LayerSpec* FindLayer(int32_t layer) const {
    for (const LayerSpec& spec : layers_) {
      if (spec.layer == layer) return &spec;
    }
    return nullptr;
  }

  const std::vector<LayerSpec> layers_;
  const Placement placement_;
  const int32_t first_rank_;
  const int32_t num_ranks_;
  std::mutex
      mutex_;  // guards the map and the flags in it; a reserved matrix's bytes belong to its reader
  std::map<KeyType, StoredMatrix> matrices_;
  bool finished_ = false;
};

}  // namespace expertd::testing
