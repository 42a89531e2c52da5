#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/check.h"

namespace expertd::testing {

// A directory of its own, removed at the end.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "expertd-test-XXXXXX").string();
    EXPERTD_CHECK(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline void WriteFile(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  EXPERTD_CHECK(file.good());
}

// Any bytes as a safetensors file: the length of `header` in front, `data` behind.
inline std::string SafetensorsBytes(const std::string& header, const std::string& data = "") {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i));
  return bytes + header + data;
}

struct TestTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string data;
};

// A well-formed file of these tensors, in name order.
inline std::string SafetensorsBytes(const std::map<std::string, TestTensor>& tensors) {
  std::string header = "{", data;
  for (const auto& [name, tensor] : tensors) {
    absl::StrAppend(&header, header.size() > 1 ? "," : "", "\"", name, "\":{\"dtype\":\"",
                    tensor.dtype, "\",\"shape\":[", absl::StrJoin(tensor.shape, ","),
                    "],\"data_offsets\":[", data.size(), ",", data.size() + tensor.data.size(),
                    "]}");
    data += tensor.data;
  }
  return SafetensorsBytes(header + "}", data);
}

// The files of a TestCheckpoint's two layers.
inline constexpr char kShard0[] = "model-00001-of-00002.safetensors";
inline constexpr char kShard1[] = "model-00002-of-00002.safetensors";

// A small checkpoint whose files a test can bend before they are written: tensors by shard,
// config.json and the index as text. Without a change it can be served.
struct TestCheckpoint {
  std::map<std::string, std::map<std::string, TestTensor>> shards;  // file name -> tensors
  std::map<std::string, std::string> index;  // tensor -> file; empty = no index
  std::string config;
  std::string quant_config;  // hf_quant_config.json; empty = none

  // DeepSeek-V4 names: H 64, I 32, E 2, K 2, layers 0 and 1, one shard a layer.
  static TestCheckpoint Mxfp4();
  static TestCheckpoint Nvfp4();

  // The tensor of that name, whichever shard it is in.
  TestTensor& Find(const std::string& name) {
    for (auto& [file, tensors] : shards) {
      if (const auto it = tensors.find(name); it != tensors.end()) return it->second;
    }
    EXPERTD_CHECK(!"no such tensor");
    return shards.begin()->second.begin()->second;
  }

  void Remove(const std::string& name) {
    for (auto& [file, tensors] : shards) tensors.erase(name);
    index.erase(name);
  }

  // Replaces a piece of config.json, which must be there.
  void EditConfig(const std::string& from, const std::string& to) {
    const size_t at = config.find(from);
    EXPERTD_CHECK(at != std::string::npos);
    config.replace(at, from.size(), to);
  }

  void Write(const std::filesystem::path& dir) const {
    for (const auto& [file, tensors] : shards) WriteFile(dir / file, SafetensorsBytes(tensors));
    WriteFile(dir / "config.json", config);
    if (!quant_config.empty()) WriteFile(dir / "hf_quant_config.json", quant_config);
    if (!index.empty()) WriteFile(dir / "model.safetensors.index.json", IndexText());
  }

  std::string IndexText() const {
    return absl::StrCat("{\"metadata\":{\"total_size\":1},\"weight_map\":{",
                        absl::StrJoin(index, ",",
                                      [](std::string* out, const auto& entry) {
                                        absl::StrAppend(out, "\"", entry.first, "\":\"",
                                                        entry.second, "\"");
                                      }),
                        "}}");
  }
};

namespace internal {

inline std::string FloatBytes(float value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

// add(name, tensor) for every tensor of one layer's experts.
inline TestCheckpoint MakeV4(
    const std::function<void(const std::string& base, int64_t out, int64_t in,
                             std::map<std::string, TestTensor>* tensors)>& add) {
  TestCheckpoint checkpoint;
  for (int layer = 0; layer < 2; ++layer) {
    const std::string file = layer == 0 ? kShard0 : kShard1;
    auto& tensors = checkpoint.shards[file];
    for (int expert = 0; expert < 2; ++expert) {
      for (int w = 1; w <= 3; ++w) {
        const std::string base = absl::StrCat("layers.", layer, ".ffn.experts.", expert, ".w", w);
        w == 2 ? add(base, 64, 32, &tensors) : add(base, 32, 64, &tensors);
      }
    }
    tensors[absl::StrCat("layers.", layer, ".ffn.gate.weight")] = {
        "BF16", {2, 64}, std::string(256, '\1')};
    for (const auto& [name, tensor] : tensors) checkpoint.index[name] = file;
  }
  checkpoint.config =
      R"({"model_type": "deepseek_v4", "hidden_size": 64, "moe_intermediate_size": 32,)"
      R"( "n_routed_experts": 2, "num_experts_per_tok": 2, "num_hidden_layers": 2,)"
      R"( "swiglu_limit": 10.0, "expert_dtype": "fp4", "hidden_act": "silu"})";
  return checkpoint;
}

}  // namespace internal

inline TestCheckpoint TestCheckpoint::Mxfp4() {
  return internal::MakeV4([](const std::string& base, int64_t out, int64_t in, auto* tensors) {
    (*tensors)[base + ".weight"] = {
        "I8", {out, in / 2}, std::string(static_cast<size_t>(out * in / 2), '\x21')};
    (*tensors)[base + ".scale"] = {
        "F8_E8M0", {out, in / 32}, std::string(static_cast<size_t>(out * in / 32), '\x7f')};
  });
}

inline TestCheckpoint TestCheckpoint::Nvfp4() {
  TestCheckpoint checkpoint =
      internal::MakeV4([](const std::string& base, int64_t out, int64_t in, auto* tensors) {
        (*tensors)[base + ".weight"] = {
            "U8", {out, in / 2}, std::string(static_cast<size_t>(out * in / 2), '\x21')};
        (*tensors)[base + ".weight_scale"] = {
            "F8_E4M3", {out, in / 16}, std::string(static_cast<size_t>(out * in / 16), '\x38')};
        (*tensors)[base + ".weight_scale_2"] = {"F32", {}, internal::FloatBytes(0.5f)};
        (*tensors)[base + ".input_scale"] = {"F32", {}, internal::FloatBytes(0.25f)};
      });
  checkpoint.quant_config = R"({"quantization": {"quant_algo": "NVFP4", "group_size": 16}})";
  return checkpoint;
}

}  // namespace expertd::testing
