#include "config/model_config.h"

#include <cmath>
#include <initializer_list>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/limits.h"
#include "nlohmann/json.hpp"

namespace expertd {
namespace {

using nlohmann::json;

// Nothing we read is deeper; a deeper text would cost memory and stack out of proportion to its
// size.
constexpr int kMaxJsonDepth = 16;

constexpr char kConfigFile[] = "config.json";
constexpr char kQuantFile[] = "hf_quant_config.json";

// A value as a message shows it: bounded, and never a parser's exception for odd bytes.
std::string Shown(const json& value) {
  if (value.is_array()) return absl::StrCat("an array of ", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 60) + "...";
  return text;
}

// Reads keys of one JSON object of the file `file` and collects what is wrong.
class KeyReader {
 public:
  KeyReader(const json& object, const char* file, std::vector<std::string>* problems)
      : object_(object), file_(file), problems_(problems) {}

  // The value of a key that is present and not null.
  const json* Find(const std::string& key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  // A whole number in [low, high] under the first of `keys` that is present; all that are present
  // must agree. Missing: a problem unless there is a default. Nothing if there was a problem.
  std::optional<int64_t> Number(std::initializer_list<const char*> keys, int64_t low, int64_t high,
                                std::optional<int64_t> fallback,
                                std::string* used_key = nullptr) const {
    std::optional<int64_t> number;
    std::string first_key;
    for (const char* key : keys) {
      const json* value = Find(key);
      if (value == nullptr) continue;
      // An unsigned number may not fit int64_t; compare it unsigned.
      const bool whole = value->is_number_integer();
      const bool inside =
          whole && (value->is_number_unsigned()
                        ? value->get<uint64_t>() >= static_cast<uint64_t>(low) &&
                              value->get<uint64_t>() <= static_cast<uint64_t>(high)
                        : value->get<int64_t>() >= low && value->get<int64_t>() <= high);
      if (!inside) {
        Problem(absl::StrCat(key, ": found ", Shown(*value), ", expected a whole number from ", low,
                             " to ", high));
        return std::nullopt;
      }
      if (number && *number != value->get<int64_t>()) {
        Problem(absl::StrCat(key, ": found ", Shown(*value), ", expected ", *number, " as in ",
                             first_key));
        return std::nullopt;
      }
      if (!number) first_key = key;
      number = value->get<int64_t>();
    }
    if (number && used_key != nullptr) *used_key = first_key;
    if (number) return number;
    if (!fallback) {
      Problem(absl::StrCat(absl::StrJoin(keys, " or "), ": missing, expected a whole number from ",
                           low, " to ", high));
    }
    return fallback;
  }

  std::string Text(const char* key) const {
    const json* value = Find(key);
    if (value == nullptr) return "";
    if (!value->is_string()) {
      Problem(absl::StrCat(key, ": found ", Shown(*value), ", expected a string"));
      return "";
    }
    return value->get<std::string>();
  }

  void Problem(const std::string& text) const {
    problems_->push_back(absl::StrCat(file_, ": ", text));
  }

 private:
  const json& object_;
  const char* file_;
  std::vector<std::string>* problems_;
};

std::optional<json> ParseObject(std::string_view text, const char* name,
                                std::vector<std::string>* problems) {
  bool too_deep = false;
  const auto keep = [&](int depth, json::parse_event_t /*event*/, json& /*parsed*/) {
    too_deep = too_deep || depth > kMaxJsonDepth;
    return depth <= kMaxJsonDepth;
  };
  // The library takes a NUL for the end of the text.
  json value = text.find('\0') == std::string_view::npos
                   ? json::parse(text.begin(), text.end(), keep, /*allow_exceptions=*/false)
                   : json(json::value_t::discarded);
  if (value.is_object() && !too_deep) return value;
  const std::string found = too_deep ? absl::StrCat("more than ", kMaxJsonDepth, " levels")
                            : value.is_discarded() ? "text that is not valid UTF-8 JSON"
                                                   : absl::StrCat("a JSON ", value.type_name());
  problems->push_back(absl::StrCat(name, ": found ", found, ", expected one JSON object"));
  return std::nullopt;
}

// Multimodal configs keep the language model's keys one level down.
const json& LanguageModel(const json& config) {
  const auto text_config = config.find("text_config");
  const bool nested = text_config != config.end() && text_config->is_object() &&
                      text_config->contains("hidden_size") && !config.contains("hidden_size");
  return nested ? *text_config : config;
}

int64_t MatrixSize(const KeyReader& keys, const char* key, int64_t high) {
  const std::optional<int64_t> size = keys.Number({key}, 1, high, std::nullopt);
  if (size && *size % limits::kGeometryMultiple != 0) {
    keys.Problem(absl::StrCat(key, ": found ", *size, ", expected a multiple of ",
                              limits::kGeometryMultiple));
  }
  return size.value_or(0);
}

int32_t Count(const KeyReader& keys, std::initializer_list<const char*> names, int64_t low,
              int64_t high, std::optional<int64_t> fallback, std::string* used_key = nullptr) {
  return static_cast<int32_t>(keys.Number(names, low, high, fallback, used_key).value_or(0));
}

float SwigluLimit(const KeyReader& keys) {
  const json* value = keys.Find("swiglu_limit");
  if (value == nullptr) return 0;
  const double limit = value->is_number() ? value->get<double>() : -1;
  if (!(limit >= 0 && std::isfinite(static_cast<float>(limit)))) {
    keys.Problem(absl::StrCat("swiglu_limit: found ", Shown(*value),
                              ", expected a finite number >= 0 (0 or null: no clamp)"));
    return 0;
  }
  return static_cast<float>(limit);
}

// Marks layers in a list of numbers as dense.
void ReadDenseList(const KeyReader& keys, const char* key, std::vector<bool>* is_moe) {
  const json* list = keys.Find(key);
  if (list == nullptr) return;
  bool good = list->is_array();
  for (size_t i = 0; good && i < list->size(); ++i) {
    const json& layer = (*list)[i];
    good = layer.is_number_unsigned();
    if (good && layer.get<uint64_t>() < is_moe->size()) (*is_moe)[layer.get<size_t>()] = false;
  }
  if (!good) {
    keys.Problem(
        absl::StrCat(key, ": found ", Shown(*list), ", expected an array of layer numbers"));
  }
}

// moe_layer_freq: a number (every n-th layer) or one 0/1 a layer.
void ReadLayerFrequency(const KeyReader& keys, std::vector<bool>* is_moe) {
  const json* value = keys.Find("moe_layer_freq");
  if (value == nullptr) return;
  if (value->is_array()) {
    bool good = value->size() == is_moe->size();
    for (size_t i = 0; good && i < value->size(); ++i) {
      const json& flag = (*value)[i];
      good = flag.is_number_unsigned() && flag.get<uint64_t>() <= 1;
      if (good && flag.get<uint64_t>() == 0) (*is_moe)[i] = false;
    }
    if (!good) {
      keys.Problem(absl::StrCat("moe_layer_freq: found ", Shown(*value),
                                ", expected a number or one 0 or 1 for each of ", is_moe->size(),
                                " layers"));
    }
    return;
  }
  const auto every = keys.Number({"moe_layer_freq"}, 1, limits::kMaxLayers, std::nullopt);
  for (size_t i = 0; every && i < is_moe->size(); ++i) {
    if (static_cast<int64_t>(i) % *every != 0) (*is_moe)[i] = false;
  }
}

// mlp_layer_types: "dense" or "sparse" for each layer.
void ReadLayerTypes(const KeyReader& keys, std::vector<bool>* is_moe) {
  const json* value = keys.Find("mlp_layer_types");
  if (value == nullptr) return;
  if (!value->is_array() || value->size() != is_moe->size()) {
    keys.Problem(absl::StrCat("mlp_layer_types: found ", Shown(*value),
                              ", expected one string for each of ", is_moe->size(), " layers"));
    return;
  }
  for (size_t i = 0; i < value->size(); ++i) {
    if ((*value)[i] == "dense") (*is_moe)[i] = false;
  }
}

std::vector<bool> MoeLayers(const KeyReader& keys, int32_t num_layers) {
  std::vector<bool> is_moe(static_cast<size_t>(num_layers), true);
  const int32_t dense = Count(keys, {"first_k_dense_replace"}, 0, limits::kMaxLayers, 0);
  for (size_t i = 0; i < is_moe.size() && static_cast<int64_t>(i) < dense; ++i) is_moe[i] = false;
  const auto step = keys.Number({"decoder_sparse_step"}, 1, limits::kMaxLayers, 1);
  for (size_t i = 0; step && i < is_moe.size(); ++i) {
    if ((static_cast<int64_t>(i) + 1) % *step != 0) is_moe[i] = false;
  }
  ReadDenseList(keys, "mlp_only_layers", &is_moe);
  ReadLayerFrequency(keys, &is_moe);
  ReadLayerTypes(keys, &is_moe);
  return is_moe;
}

// `config`: the object that may hold quantization_config.
void ReadQuantization(const KeyReader& config, const json* quant_file,
                      std::vector<std::string>* problems, ModelConfig* model) {
  if (const json* section = config.Find("quantization_config"); section != nullptr) {
    if (!section->is_object()) {
      config.Problem(
          absl::StrCat("quantization_config: found ", Shown(*section), ", expected an object"));
    } else {
      const KeyReader keys(*section, kConfigFile, problems);
      model->quant_method = keys.Text("quant_method");
      for (const char* key : {"quant_algo", "moe_quant_algo", "format"}) {
        if (std::string text = keys.Text(key); !text.empty()) model->quant_format = std::move(text);
      }
    }
  }
  if (quant_file == nullptr) return;
  if (model->quant_method.empty()) model->quant_method = "modelopt";
  const KeyReader file(*quant_file, kQuantFile, problems);
  const json* section = file.Find("quantization");
  if (section == nullptr || !section->is_object()) {
    file.Problem(
        absl::StrCat("quantization: ", section == nullptr ? "missing" : "found " + Shown(*section),
                     ", expected an object"));
    return;
  }
  const std::string algorithm = KeyReader(*section, kQuantFile, problems).Text("quant_algo");
  if (model->quant_format.empty()) model->quant_format = algorithm;
}

void ReadGeometry(const KeyReader& keys, ModelConfig* model) {
  model->hidden_size = MatrixSize(keys, "hidden_size", limits::kMaxHiddenSize);
  model->num_experts = Count(keys, {"n_routed_experts", "num_experts", "num_local_experts"}, 1,
                             limits::kMaxExperts, std::nullopt, &model->experts_key);
  // Models that count num_local_experts have no dense feed-forward whose size would need another
  // key.
  const bool plain_key =
      model->experts_key == "num_local_experts" && keys.Find("moe_intermediate_size") == nullptr;
  model->intermediate_size =
      MatrixSize(keys, plain_key ? "intermediate_size" : "moe_intermediate_size",
                 limits::kMaxIntermediateSize);
  model->top_k =
      Count(keys, {"num_experts_per_tok", "experts_per_token"}, 1, limits::kMaxTopK, std::nullopt);
  model->num_hidden_layers =
      Count(keys, {"num_hidden_layers"}, 1, limits::kMaxLayers, std::nullopt);
  model->num_mtp_layers = Count(keys, {"num_nextn_predict_layers"}, 0, limits::kMaxLayers, 0);
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json,
                                             std::string_view quant_json) {
  std::vector<std::string> problems;
  ModelConfig model;
  const std::optional<json> config = ParseObject(config_json, kConfigFile, &problems);
  std::optional<json> quant_file;
  if (!quant_json.empty()) quant_file = ParseObject(quant_json, kQuantFile, &problems);
  if (!config) return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));

  const json& language_model = LanguageModel(*config);
  const KeyReader keys(language_model, kConfigFile, &problems);
  model.model_type = keys.Text("model_type");
  ReadGeometry(keys, &model);
  if (problems.empty() && model.top_k > model.num_experts) {
    keys.Problem(absl::StrCat("num_experts_per_tok: found ", model.top_k, ", expected at most ",
                              model.experts_key, " = ", model.num_experts));
  }
  model.swiglu_limit = SwigluLimit(keys);
  model.expert_dtype = keys.Text("expert_dtype");
  if (const std::string act = keys.Text("hidden_act"); !act.empty() && act != "silu") {
    keys.Problem(absl::StrCat("hidden_act: found ", Shown(act), ", expected silu"));
  }
  // Lists of one entry a layer cannot be judged without the count.
  if (model.num_hidden_layers > 0) model.is_moe = MoeLayers(keys, model.num_hidden_layers);
  const bool nested = language_model.contains("quantization_config");
  ReadQuantization(KeyReader(nested ? language_model : *config, kConfigFile, &problems),
                   quant_file ? &*quant_file : nullptr, &problems, &model);
  if (!problems.empty()) return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
  return model;
}

}  // namespace expertd
