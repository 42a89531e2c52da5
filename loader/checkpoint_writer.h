#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/model_spec.h"
#include "loader/checkpoint_defect.h"

namespace expertd {

// The naming schemes that make-checkpoint writes.
enum class CheckpointStyle {
  kDeepSeekV4,  // layers.{L}.ffn.experts.{e}.w{1,2,3}.*: MXFP4 or NVFP4
  kQwen3,       // model.layers.{L}.mlp.experts.{e}.{gate,up,down}_proj.*: NVFP4 (modelopt)
};

// A random checkpoint. The same options give the same bytes on every machine, and the bytes of an
// expert do not depend on which others are written. Unit-RMS hidden states give outputs of about
// unit RMS; a few rows are large enough to meet the clamp, and one block in 64 is zero.
struct CheckpointRequest {
  std::filesystem::path dir;  // made; must not exist or be empty
  CheckpointStyle style = CheckpointStyle::kDeepSeekV4;
  int64_t hidden_size = 256;
  int64_t intermediate_size = 128;
  int32_t num_experts = 8;  // E of config.json
  int32_t top_k = 2;
  std::vector<int32_t> layers = {0, 1};  // numbers in the tensor names
  int32_t num_hidden_layers = 2;         // config.json
  Recipe recipe = Recipe::kMxfp4;
  float swiglu_limit = 10.0f;  // DeepSeek-V4 only; Qwen3 has no clamp
  uint64_t seed = 1;
  uint64_t shard_bytes = 64u << 20;  // a shard closes after the tensor that passes this

  int32_t num_mtp_layers = 0;        // DeepSeek-V4: mtp.{n}, always MXFP4
  std::vector<int32_t> experts;      // write only these, e.g. those of one rank; empty = all
  bool power_of_two_scales = false;  // NVFP4 as a lossless cast of MXFP4 gives it
  CheckpointDefect defect = CheckpointDefect::kNone;
};

struct CheckpointSummary {
  int32_t num_shards = 0;
  int64_t num_tensors = 0;
  uint64_t bytes = 0;  // of all shards
};

// Streams tensor by tensor: about a megabyte of memory, whatever the size. `summary` may be null.
absl::Status WriteCheckpoint(const CheckpointRequest& request,
                             CheckpointSummary* summary = nullptr);

// Published geometries, all their layers: "tiny", "flash", "pro", "v3", "gptoss-shaped", "qwen3".
struct CheckpointPreset {
  std::string_view name;
  std::string_view description;
  CheckpointStyle style;
  Recipe recipe;
  int64_t hidden_size;
  int64_t intermediate_size;
  int32_t num_experts;
  int32_t top_k;
  int32_t num_layers;
};
const std::vector<CheckpointPreset>& CheckpointPresets();
absl::StatusOr<CheckpointRequest> RequestFromPreset(std::string_view name);

}  // namespace expertd
