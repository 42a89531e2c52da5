#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/reference.h"

namespace expertd::testing {

LayerSpec MakeSpec(Recipe recipe, int64_t hidden_size, int64_t intermediate_size,
                   int32_t num_experts);

// Random expert matrices of one layer, the same for every placement. One block in 16 is zero, with
// scale byte 0; NVFP4 matrices have different second levels.
class RandomExperts {
 public:
  struct Bytes {
    std::vector<uint8_t> codes;
    std::vector<uint8_t> scales;
    float second_level = 1;
  };

  RandomExperts(const LayerSpec& spec, uint64_t seed);

  const LayerSpec& spec() const { return spec_; }
  Bytes& At(int32_t expert, Matrix matrix) {
    return matrices_[expert * kNumMatrices + static_cast<int>(matrix)];
  }
  const Bytes& At(int32_t expert, Matrix matrix) const {
    return matrices_[expert * kNumMatrices + static_cast<int>(matrix)];
  }
  std::vector<reference::ExpertView> Views() const;

  // Fills every slot of ranks [first_rank, first_rank + num_ranks) and finishes.
  absl::Status LoadInto(WeightSink& sink, const Placement& placement, int32_t first_rank,
                        int32_t num_ranks) const;

 private:
  LayerSpec spec_;
  std::vector<Bytes> matrices_;
};

// The rows of one request; hidden states are representable in bf16.
struct Rows {
  int32_t num_tokens = 0;
  int32_t top_k = 0;
  std::vector<float> hidden;   // [T, H]
  std::vector<int32_t> ids;    // [T, K]
  std::vector<float> weights;  // [T, K]
};

Rows RandomRows(const LayerSpec& spec, int32_t num_tokens, int32_t top_k, uint64_t seed);
Rows Slice(const LayerSpec& spec, const Rows& rows, int32_t begin, int32_t end);

std::vector<double> Expected(const RandomExperts& experts, const Rows& rows);

// A backend with the experts loaded. Fails the test if anything is refused.
std::unique_ptr<Backend> MakeLoaded(const RandomExperts& experts, const Placement& placement,
                                    int32_t max_tokens, int32_t num_threads = 2);
std::unique_ptr<Backend> MakeLoaded(const RandomExperts& experts, cpu::CpuBackendOptions options);

struct StepOptions {
  DType input_dtype = DType::kBf16;
  DType output_dtype = DType::kF32;
  uint64_t step = 0;
  bool all_on_rank_zero = false;  // otherwise token t is at home on rank t mod R
};

// Runs one step; the output rows in the order of `rows`, as f32. row_in_request is the index in
// `rows`.
absl::StatusOr<std::vector<float>> RunStep(Backend& backend, const LayerSpec& spec,
                                           const Rows& rows, const StepOptions& options = {});

// Submits and waits.
StepResult RunAndWait(Backend& backend, const MoeStep& step);

bool SameBits(absl::Span<const float> a, absl::Span<const float> b);

}  // namespace expertd::testing
