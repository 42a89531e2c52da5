#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/check.h"
#include "config/model_spec.h"
#include "kernels/reference/reference.h"
#include "nlohmann/json.hpp"
#include "tests/testing/golden_vectors.h"

// A second, tiny reader of checkpoints that shares no code with the loader: whole files in memory,
// everything trusted. For tests that must not depend on the loader, and of families it refuses.
namespace expertd::testing {

class GoldenCheckpoint {
 public:
  explicit GoldenCheckpoint(const std::filesystem::path& dir) {
    for (const auto& entry : std::filesystem::directory_iterator(dir)) {
      if (entry.path().extension() == ".safetensors") ReadShard(entry.path());
    }
    EXPERTD_CHECK(!tensors_.empty());
  }

  // Views into this object; experts of one layer in order.
  std::vector<reference::ExpertView> Layer(const LayerSpec& spec, int32_t num_hidden_layers) const {
    std::vector<reference::ExpertView> experts(spec.num_experts);
    for (int32_t expert = 0; expert < spec.num_experts; ++expert) {
      for (int m = 0; m < kNumMatrices; ++m) {
        const std::string stem = Stem(spec.layer, num_hidden_layers, expert, m);
        experts[expert].matrices[m] = View(stem);
      }
    }
    return experts;
  }

  const std::map<std::string, std::string>& tensors() const { return tensors_; }

 private:
  void ReadShard(const std::filesystem::path& path) {
    const std::string file = ReadWholeFile(path);
    uint64_t length = 0;
    EXPERTD_CHECK(file.size() >= sizeof length);
    std::memcpy(&length, file.data(), sizeof length);
    const auto header = nlohmann::json::parse(file.substr(8, length));
    for (const auto& [name, info] : header.items()) {
      if (name == "__metadata__") continue;
      const uint64_t begin = info.at("data_offsets")[0];
      const uint64_t end = info.at("data_offsets")[1];
      EXPERTD_CHECK(begin <= end && 8 + length + end <= file.size());
      tensors_[name] = file.substr(8 + length + begin, end - begin);
    }
  }

  std::string Stem(int32_t layer, int32_t num_hidden_layers, int32_t expert, int matrix) const {
    static constexpr const char* kDeepSeek[] = {"w1", "w3", "w2"};
    static constexpr const char* kQwen[] = {"gate_proj", "up_proj", "down_proj"};
    const bool mtp = layer >= num_hidden_layers;
    const std::string where = mtp ? "mtp." + std::to_string(layer - num_hidden_layers)
                                  : "layers." + std::to_string(layer);
    const std::string middle = ".experts." + std::to_string(expert) + ".";
    const std::string deep_seek = where + ".ffn" + middle + kDeepSeek[matrix];
    if (tensors_.count(deep_seek + ".weight") > 0) return deep_seek;
    return "model." + where + ".mlp" + middle + kQwen[matrix];
  }

  reference::MatrixView View(const std::string& stem) const {
    reference::MatrixView view;
    view.codes = Bytes(FirstOf({stem + ".weight", stem + ".weight_packed"}));
    view.scales = Bytes(FirstOf({stem + ".scale", stem + ".weight_scale"}));
    if (const auto factor = Scalar(stem + ".weight_scale_2")) view.second_level = *factor;
    if (const auto divisor = Scalar(stem + ".weight_global_scale"))
      view.second_level = 1 / *divisor;
    return view;
  }

  const std::string& FirstOf(const std::vector<std::string>& names) const {
    for (const std::string& name : names) {
      if (const auto found = tensors_.find(name); found != tensors_.end()) return found->second;
    }
    std::fprintf(stderr, "no tensor %s\n", names.front().c_str());
    std::abort();
  }

  std::optional<double> Scalar(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return std::nullopt;
    float value = 0;
    EXPERTD_CHECK(found->second.size() == sizeof value);
    std::memcpy(&value, found->second.data(), sizeof value);
    return value;
  }

  static absl::Span<const uint8_t> Bytes(const std::string& bytes) {
    return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
  }

  std::map<std::string, std::string> tensors_;  // name -> bytes
};

}  // namespace expertd::testing
