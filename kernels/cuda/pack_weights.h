#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "config/model_spec.h"
#include "kernels/layout/packed_weights.h"

// From the file's layout to the packed layout (kernels/layout/packed_weights.h), on the GPU.
namespace expertd::cuda {

// FC1 holds gate and up interleaved, FC2 down.
constexpr layout::WeightFormat FormatOf(Recipe recipe) {
  return recipe == Recipe::kMxfp4 ? layout::WeightFormat::kMx : layout::WeightFormat::kNv;
}
constexpr layout::PackedMatrix PackedFc1(const LayerSpec& spec) {
  return {FormatOf(spec.recipe), static_cast<int>(2 * spec.intermediate_size),
          static_cast<int>(spec.hidden_size)};
}
constexpr layout::PackedMatrix PackedFc2(const LayerSpec& spec) {
  return {FormatOf(spec.recipe), static_cast<int>(spec.hidden_size),
          static_cast<int>(spec.intermediate_size)};
}

// The packed weights of a layer, all slots, in device memory.
struct PackedLayer {
  uint8_t* fc1_units = nullptr;  // [slots] of PackedFc1(spec).slot_bytes()
  uint8_t* fc2_units = nullptr;  // [slots] of PackedFc2(spec).slot_bytes()
  float* fc1_factors = nullptr;  // [slots, tiles, 2], see PackedMatrix::scales_per_slot
  float* fc2_factors = nullptr;
};

// Bytes of a layer's PackedLayer, each array starting on a multiple of 256; SetPackedLayer places
// the arrays in a block of that size.
size_t PackedLayerBytes(const LayerSpec& spec, int32_t num_slots);
PackedLayer SetPackedLayer(const LayerSpec& spec, int32_t num_slots, void* block);

// Device bytes that LaunchPack needs for any matrix of the layer.
size_t PackScratchBytes(const LayerSpec& spec);

// Enqueues the packing of one matrix of one slot. codes [out, in/2] and scales [out, in/group] are
// device memory, 16-byte aligned, and free again when the stream has passed. Gate and up may come
// in any order. Block scales are what the loader lets through: no NaN in a non-zero block, none
// negative.
absl::Status LaunchPack(const LayerSpec& spec, const PackedLayer& layer, int32_t slot,
                        Matrix matrix, const uint8_t* codes, const uint8_t* scales,
                        float second_level, void* scratch, cudaStream_t stream);

}  // namespace expertd::cuda
