#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace expertd {

// How a matrix is held in FP4. Value of a weight = e2m1(code) * block scale * second level.
enum class Recipe {
  kMxfp4,  // UE8M0 scale per 32 weights of K, no second level (1.0)
  kNvfp4,  // E4M3 scale per 16 weights of K, one F32 second-level scale a matrix
};

std::string_view RecipeName(Recipe recipe);  // "mxfp4", "nvfp4"

// Weights of K that share one block scale byte.
constexpr int64_t ScaleGroup(Recipe recipe) { return recipe == Recipe::kMxfp4 ? 32 : 16; }

// One MoE layer as it is served. Every layer of a model has the same shape; the recipe may differ
// (multi-token-prediction layers of NVFP4 checkpoints stay MXFP4).
struct LayerSpec {
  int32_t layer = 0;              // number in the tensor names; mtp.n is num_hidden_layers + n
  int64_t hidden_size = 0;        // H
  int64_t intermediate_size = 0;  // I, after SwiGLU
  int32_t num_experts = 0;        // E
  int32_t top_k = 0;              // K as trained; a request may use any K up to limits::kMaxTopK
  Recipe recipe = Recipe::kMxfp4;
  float swiglu_limit = 0;  // gate <= limit, |up| <= limit; 0 = no clamp

  bool operator==(const LayerSpec&) const = default;
};

// The three matrices of an expert, in file terms [out, in]: gate and up [I, H], down [H, I].
enum class Matrix { kGate = 0, kUp = 1, kDown = 2 };
inline constexpr int kNumMatrices = 3;

std::string_view MatrixName(Matrix matrix);  // "gate", "up", "down"

struct MatrixShape {
  int64_t out = 0;
  int64_t in = 0;

  int64_t CodeBytes() const { return out * in / 2; }
  int64_t ScaleBytes(Recipe recipe) const { return out * (in / ScaleGroup(recipe)); }
};

constexpr MatrixShape ShapeOf(const LayerSpec& spec, Matrix matrix) {
  return matrix == Matrix::kDown ? MatrixShape{spec.hidden_size, spec.intermediate_size}
                                 : MatrixShape{spec.intermediate_size, spec.hidden_size};
}

}  // namespace expertd
