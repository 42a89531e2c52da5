// The json files that make-checkpoint writes beside the shards, cut to what concerns the experts.
#include <utility>

#include "absl/strings/str_cat.h"
#include "loader/checkpoint_plan.h"
#include "nlohmann/json.hpp"

namespace expertd {
namespace {

using Json = nlohmann::ordered_json;

Json GroupOf16(bool with_targets) {
  const Json fp4 = {{"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", 16}};
  Json group = {{"weights", fp4}, {"input_activations", fp4}};
  if (with_targets) group["targets"] = Json::array({"Linear"});
  return group;
}

Json DeepSeekV4Config(const CheckpointRequest& request) {
  Json quantization = {{"quant_method", "fp8"},
                       {"fmt", "e4m3"},
                       {"scale_fmt", "ue8m0"},
                       {"activation_scheme", "dynamic"},
                       {"weight_block_size", {128, 128}}};
  if (request.recipe == Recipe::kNvfp4) quantization["moe_quant_algo"] = "NVFP4";
  return {{"architectures", Json::array({"DeepseekV4ForCausalLM"})},
          {"model_type", "deepseek_v4"},
          {"hidden_size", request.hidden_size},
          {"moe_intermediate_size", request.intermediate_size},
          {"n_routed_experts", request.num_experts},
          {"num_experts_per_tok", request.top_k},
          {"num_hidden_layers", request.num_hidden_layers},
          {"num_nextn_predict_layers", request.num_mtp_layers},
          {"hidden_act", "silu"},
          {"swiglu_limit", request.swiglu_limit},
          {"routed_scaling_factor", 1.5},
          {"expert_dtype", "fp4"},
          {"torch_dtype", "bfloat16"},
          {"quantization_config", std::move(quantization)}};
}

Json Qwen3Config(const CheckpointRequest& request) {
  Json quantization = {
      {"quant_method", "modelopt"},
      {"quant_algo", "NVFP4"},
      {"ignore", {"lm_head", "model.layers.*.mlp.gate", "model.layers.*.self_attn*"}},
      {"config_groups", {{"group_0", GroupOf16(true)}}}};
  return {{"architectures", Json::array({"Qwen3MoeForCausalLM"})},
          {"model_type", "qwen3_moe"},
          {"hidden_size", request.hidden_size},
          {"moe_intermediate_size", request.intermediate_size},
          {"num_experts", request.num_experts},
          {"num_experts_per_tok", request.top_k},
          {"num_hidden_layers", request.num_hidden_layers},
          {"hidden_act", "silu"},
          {"decoder_sparse_step", 1},
          {"mlp_only_layers", Json::array()},
          {"torch_dtype", "bfloat16"},
          {"quantization_config", std::move(quantization)}};
}

Json ModeloptConfig(const CheckpointRequest& request) {
  const bool qwen = request.style == CheckpointStyle::kQwen3;
  Json quantization = {{"quant_algo", qwen ? "NVFP4" : "MIXED_PRECISION"},
                       {"kv_cache_quant_algo", nullptr},
                       {"group_size", 16}};
  if (qwen) {
    quantization["exclude_modules"] = {"lm_head", "model.layers.*.mlp.gate"};
  } else {
    quantization["exclude_modules"] = {"*.attn.*", "*.ffn.gate.*", "mtp.*"};
    Json layers = Json::object();
    for (const int32_t layer : request.layers) {
      layers[absl::StrCat("layers.", layer, ".ffn.experts")] = {{"quant_algo", "NVFP4"},
                                                                {"group_size", 16}};
    }
    quantization["quantized_layers"] = std::move(layers);
  }
  return {{"producer", {{"name", "modelopt"}, {"version", "0.40.0"}}},
          {"quantization", std::move(quantization)}};
}

void BreakConfig(CheckpointDefect defect, Json* config) {
  if (defect == CheckpointDefect::kConfigMissingKey) config->erase("hidden_size");
  if (defect == CheckpointDefect::kConfigWrongType) (*config)["hidden_size"] = "256";
  if (defect == CheckpointDefect::kConfigAbsurdNumber) {
    (*config)["moe_intermediate_size"] = 1'000'000'000'000'000;
  }
}

}  // namespace

std::vector<std::pair<std::string, std::string>> ConfigFiles(const CheckpointRequest& request) {
  const bool qwen = request.style == CheckpointStyle::kQwen3;
  Json config = qwen ? Qwen3Config(request) : DeepSeekV4Config(request);
  BreakConfig(request.defect, &config);
  std::string text = config.dump(1) + "\n";
  if (request.defect == CheckpointDefect::kConfigNotJson) text.resize(text.size() / 2);
  std::vector<std::pair<std::string, std::string>> files = {{"config.json", std::move(text)}};
  if (request.recipe == Recipe::kNvfp4) {
    files.emplace_back("hf_quant_config.json", ModeloptConfig(request).dump(1) + "\n");
  }
  return files;
}

std::string IndexJson(const CheckpointRequest& request, const CheckpointPlan& plan) {
  nlohmann::json weight_map = nlohmann::json::object();  // sorted by name
  for (size_t shard = plan.shards.size(); shard-- > 0;) {
    for (const PlannedTensor& tensor : plan.shards[shard]) {
      weight_map[tensor.name] = plan.ShardName(shard);
    }
  }
  if (request.defect == CheckpointDefect::kWrongShardInIndex) {
    weight_map[plan.shards.front().back().name] = plan.ShardName(plan.shards.size() - 1);
  }
  if (request.defect == CheckpointDefect::kPathTraversal) {
    weight_map[plan.shards.front().back().name] = "../" + plan.ShardName(0);
  }
  const Json index = {{"metadata", {{"total_size", plan.TensorBytes()}}},
                      {"weight_map", std::move(weight_map)}};
  return index.dump(1) + "\n";
}

}  // namespace expertd
