#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "config/model_spec.h"

namespace expertd {

// The naming schemes that make-checkpoint writes.
enum class CheckpointStyle {
  kDeepSeekV4,  // layers.{L}.ffn.experts.{e}.w{1,2,3}.*: MXFP4 or NVFP4
  kQwen3,       // model.layers.{L}.mlp.experts.{e}.{gate,up,down}_proj.*: NVFP4 (modelopt)
};

// A random checkpoint. The same options give the same bytes on every machine.
struct CheckpointRequest {
  std::filesystem::path dir;  // made; must not exist or be empty
  CheckpointStyle style = CheckpointStyle::kDeepSeekV4;
  int64_t hidden_size = 256;
  int64_t intermediate_size = 128;
  int32_t num_experts = 8;
  int32_t top_k = 2;
  std::vector<int32_t> layers = {0, 1};  // numbers in the tensor names
  int32_t num_hidden_layers = 2;         // config.json
  Recipe recipe = Recipe::kMxfp4;
  float swiglu_limit = 10.0f;
  uint64_t seed = 1;
  uint64_t shard_bytes = 64u << 20;  // a shard closes after the tensor that passes this
};

absl::Status WriteCheckpoint(const CheckpointRequest& request);

}  // namespace expertd
