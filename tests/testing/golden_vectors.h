#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <type_traits>
#include <vector>

#include "config/check.h"
#include "config/model_spec.h"
#include "kernels/formats.h"
#include "nlohmann/json.hpp"

// Reads tests/vectors: requests and right answers made by independent code. Anything unexpected in
// these files ends the test program.
namespace expertd::testing {

struct GoldenRequest {
  std::string name;                 // "l0-t17"
  int32_t layer = 0;                // mtp.n is num_hidden_layers + n
  int32_t num_tokens = 0;           // T
  int32_t top_k = 0;                // K
  std::vector<uint16_t> hidden;     // [T, H] bf16
  std::vector<int32_t> ids;         // [T, K], -1 = masked
  std::vector<float> weights;       // [T, K], 12345 where masked
  std::vector<double> expected;     // [T, H]
  std::vector<float> expected_f32;  // [T, H] the same, rounded
  double expected_rel_l2_bf16 = 0;  // a bf16 backend stays within twice that
  bool equals_v4_mxfp4 = false;     // v4-nvfp4-pow2: the same bits as v4-mxfp4's request

  // The hidden states as float or double.
  template <typename T>
  std::vector<T> HiddenAs() const {
    std::vector<T> values;
    for (const uint16_t bits : hidden) values.push_back(Bf16ToFloat(bits));
    return values;
  }
};

struct GoldenCase {
  std::string name;                  // "v4-mxfp4"
  std::filesystem::path checkpoint;  // directory
  Recipe recipe = Recipe::kMxfp4;    // of every layer but mtp, which is MXFP4
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t num_hidden_layers = 0;
  float swiglu_limit = 0;               // 0 = no clamp
  bool plain_swiglu = true;             // false: gpt-oss's activation
  std::vector<GoldenRequest> requests;  // mtp last

  LayerSpec Spec(int32_t layer) const {
    LayerSpec spec;
    spec.layer = layer;
    spec.hidden_size = hidden_size;
    spec.intermediate_size = intermediate_size;
    spec.num_experts = num_experts;
    spec.top_k = top_k;
    spec.recipe = layer >= num_hidden_layers ? Recipe::kMxfp4 : recipe;
    spec.swiglu_limit = swiglu_limit;
    return spec;
  }
};

// Cases whose checkpoints the daemon serves; the others are recognised and refused by name.
inline const std::vector<std::string>& ServedGoldenCases() {
  static const std::vector<std::string> cases = {"v4-mxfp4", "v4-nvfp4", "v4-nvfp4-pow2",
                                                 "qwen3-nvfp4"};
  return cases;
}

// The environment variable wins: a test program may run on another machine than it was built on.
inline std::filesystem::path GoldenDirectory(const std::string& name) {
  const char* moved = std::getenv("EXPERTD_TEST_VECTORS");
  return std::filesystem::path(moved != nullptr ? moved : EXPERTD_TEST_VECTORS) / name;
}

inline std::string ReadWholeFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPERTD_CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

template <typename T>
std::vector<T> ReadArray(const std::filesystem::path& path, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::string bytes = ReadWholeFile(path);
  EXPERTD_CHECK(bytes.size() == count * sizeof(T));
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline GoldenRequest LoadGoldenRequest(const std::filesystem::path& dir, const nlohmann::json& json,
                                       int64_t hidden_size, int32_t mtp_layer) {
  GoldenRequest request;
  request.name = json.at("name");
  request.layer = json.at("layer").is_string() ? mtp_layer : json.at("layer").get<int32_t>();
  request.num_tokens = json.at("T");
  request.top_k = json.at("K");
  request.expected_rel_l2_bf16 = json.at("expected_rel_l2_bf16");
  request.equals_v4_mxfp4 = json.value("equals_v4_mxfp4", false);
  const size_t rows = static_cast<size_t>(request.num_tokens);
  const auto file = [&](const char* key) { return dir / json.at(key).get<std::string>(); };
  request.hidden = ReadArray<uint16_t>(file("hidden"), rows * hidden_size);
  request.ids = ReadArray<int32_t>(file("ids"), rows * request.top_k);
  request.weights = ReadArray<float>(file("weights"), rows * request.top_k);
  request.expected = ReadArray<double>(file("expected_f64"), rows * hidden_size);
  request.expected_f32 = ReadArray<float>(file("expected_f32"), rows * hidden_size);
  return request;
}

inline GoldenCase LoadGoldenCase(const std::string& name) {
  const std::filesystem::path dir = GoldenDirectory(name);
  const auto json = nlohmann::json::parse(ReadWholeFile(dir / "requests.json"));
  const auto config = nlohmann::json::parse(ReadWholeFile(dir / "checkpoint" / "config.json"));
  GoldenCase golden;
  golden.name = name;
  golden.checkpoint = dir / "checkpoint";
  golden.recipe = json.at("recipe") == "nvfp4" ? Recipe::kNvfp4 : Recipe::kMxfp4;
  golden.hidden_size = json.at("hidden_size");
  golden.intermediate_size = json.at("moe_intermediate_size");
  golden.num_experts = json.at("num_experts");
  golden.top_k = json.at("top_k");
  golden.num_hidden_layers = config.at("num_hidden_layers");
  const auto& activation = json.at("activation");
  golden.plain_swiglu = activation.at("kind") == "swiglu";
  if (!activation.at("limit").is_null()) golden.swiglu_limit = activation.at("limit");
  for (const char* list : {"requests", "mtp_requests"}) {
    if (!json.contains(list)) continue;
    for (const auto& request : json.at(list)) {
      golden.requests.push_back(
          LoadGoldenRequest(dir, request, golden.hidden_size, golden.num_hidden_layers));
    }
  }
  EXPERTD_CHECK(!golden.requests.empty());
  return golden;
}

}  // namespace expertd::testing
