#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/layout/packed_weights.h"
#include "kernels/layout/workspace.h"

// How the fused kernel is launched: pure functions of shapes, testable without a GPU.
namespace expertd::cuda {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // a CTA's dynamic shared memory on SM90

struct LayerShape {
  layout::WeightFormat format = layout::WeightFormat::kMx;
  int64_t hidden = 0;        // H
  int64_t intermediate = 0;  // I
  int32_t num_experts = 0;   // E, of the layer
  int32_t num_slots = 0;     // of this rank
  int32_t num_ranks = 1;
};

struct KernelConfig {
  int32_t token_tile = 0;    // most token rows of a tile, multiple of 8
  int32_t num_stages = 0;    // of weights, and as many of tokens
  int32_t num_ctas = 0;      // one an SM
  int32_t near_routes = 0;   // routes of a step whose sorted list a CTA keeps in shared memory
  int32_t shared_bytes = 0;  // of a CTA

  std::string ToString() const;
  bool operator==(const KernelConfig&) const = default;
};

// INVALID_ARGUMENT with field, found and expected if the kernel cannot serve such a layer.
absl::Status CheckLayerShape(const LayerShape& layer);

// The configuration for steps of up to `tokens` rows a rank with K routes each. A function of the
// shapes only: routing never changes it, every routing is served by any of them.
absl::StatusOr<KernelConfig> ChooseKernelConfig(const LayerShape& layer, int32_t tokens,
                                                int32_t top_k, int32_t num_sms);

// INVALID_ARGUMENT unless compute capability 9.0 with enough shared memory.
absl::Status CheckDevice(int major, int minor, int64_t shared_bytes_per_block);

}  // namespace expertd::cuda
