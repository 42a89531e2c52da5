#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace expertd {

// What a checkpoint's config.json (and hf_quant_config.json, if there is one) says about its
// experts. Every number is inside config/limits.h. What the tensors say is the loader's business.
struct ModelConfig {
  std::string model_type;         // "deepseek_v4"; may be empty
  int64_t hidden_size = 0;        // H
  int64_t intermediate_size = 0;  // I of one routed expert
  int32_t num_experts = 0;        // E
  int32_t top_k = 0;              // K
  int32_t num_hidden_layers = 0;
  int32_t num_mtp_layers = 0;  // numbered from num_hidden_layers
  float swiglu_limit = 0;      // 0 = no clamp
  std::string expert_dtype;    // "fp4", "fp8"; empty if the key is absent
  std::string quant_method;    // "fp8", "modelopt", "compressed-tensors", "mxfp4"; may be empty
  std::string quant_format;  // quant_algo or format: "NVFP4", "nvfp4-pack-quantized"; may be empty
  std::vector<bool> is_moe;  // [num_hidden_layers] false = dense by the config

  // What the config calls the keys, for messages.
  std::string experts_key = "n_routed_experts";
};

// Pure. `quant_json` may be empty. INVALID_ARGUMENT with every wrong key at once, one a line:
// file, field, what was found, what was expected.
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json,
                                             std::string_view quant_json = {});

}  // namespace expertd
