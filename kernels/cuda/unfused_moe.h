#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "config/dtype.h"
#include "config/model_spec.h"
#include "kernels/cuda/pack_weights.h"

// The same layer as the fused kernel computes, by a few plain kernels: the oracle at real sizes and
// the fallback path. Weights exact, hidden states BF16, everything between in f32 (the intermediate
// h too), rounded once at the end. A row's bits do not depend on the other rows or on timing.
namespace expertd::cuda {

// The matrices of a layer in file layout, in device memory.
struct CanonicalLayer {
  const uint8_t* codes[kNumMatrices];   // [slots, out, in/2] by Matrix, low nibble = even K element
  const uint8_t* scales[kNumMatrices];  // [slots, out, in/group]
  const float* second_level;            // [slots, kNumMatrices]
};

// Which slots hold an expert; device memory. The replica of a route is
// slots[first_slot[e] + row_in_request % count], as in Placement::SlotFor.
struct PlacementTable {
  const int32_t* first_slot;  // [E + 1]
  const int32_t* slots;       // by expert, concatenated
};

// One step; device memory. Ids outside [-1, E) must not occur.
struct UnfusedStep {
  int32_t num_tokens = 0;                   // T
  int32_t top_k = 0;                        // K
  const uint16_t* hidden = nullptr;         // [T, H] BF16
  const int32_t* ids = nullptr;             // [T, K]
  const float* weights = nullptr;           // [T, K]; not read where the id is -1
  const int32_t* row_in_request = nullptr;  // [T]
  void* output = nullptr;                   // [T, H], every element is written
  DType output_dtype = DType::kBf16;
};

// Device bytes that LaunchUnfusedMoe needs beside the weights.
size_t UnfusedWorkspaceBytes(const LayerSpec& spec, int32_t num_slots, int32_t max_tokens,
                             int32_t max_top_k);

// Enqueues the layer on `stream`. H and I are multiples of 64. The workspace need not be cleared
// and is free again when the stream has passed.
absl::Status LaunchUnfusedMoe(const LayerSpec& spec, int32_t num_slots, const CanonicalLayer& layer,
                              const PlacementTable& placement, const UnfusedStep& step,
                              void* workspace, cudaStream_t stream);
absl::Status LaunchUnfusedMoe(const LayerSpec& spec, int32_t num_slots, const PackedLayer& layer,
                              const PlacementTable& placement, const UnfusedStep& step,
                              void* workspace, cudaStream_t stream);

}  // namespace expertd::cuda
