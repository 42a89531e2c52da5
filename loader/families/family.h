#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "config/model_spec.h"

namespace expertd {

// What one tensor of a routed expert holds.
enum class ExpertPart {
  kCodes,        // FP4, two a byte, [out, in/2]
  kUe8m0Scales,  // MXFP4: [out, in/32]
  kE4m3Scales,   // NVFP4: [out, in/16]
  kSecondLevel,  // NVFP4: F32 scalar, multiplied
  kInputScale,   // NVFP4: F32 scalar, reported only
};
inline constexpr int kNumExpertParts = 5;

// A tensor name of a naming scheme, taken apart.
struct ExpertTensorName {
  std::string_view prefix;  // before "layers." or "mtp.": "", "model.", "model.language_model."
  bool mtp = false;         // `layer` counts the multi-token-prediction layers
  int32_t layer = 0;
  int32_t expert = 0;
  Matrix matrix = Matrix::kGate;
  ExpertPart part = ExpertPart::kCodes;
};

// A naming scheme that is served. Adding one: a file here and a line in ServedFamilies.
struct Family {
  std::string_view name;
  // Nothing if the name is not one of this scheme's expert tensors. Views point into the argument.
  std::optional<ExpertTensorName> (*parse)(std::string_view tensor);
  // The inverse.
  std::string (*compose)(const ExpertTensorName& name);
};

// A scheme that is recognised in order to be refused by its name.
struct RefusedFamily {
  std::string_view name;
  bool (*matches)(std::string_view tensor);
};

const Family& DeepSeekV4Family();  // deepseek_v4.cc: layers.L.ffn.experts.e.w1
const Family& ModeloptFamily();    // modelopt.cc: model.layers.L.mlp.experts.e.gate_proj
const Family& MiniMaxFamily();     // minimax.cc: model.layers.L.block_sparse_moe.experts.e.w1
const RefusedFamily& CompressedTensorsFamily();  // compressed_tensors.cc
const RefusedFamily& GptOssFamily();             // gpt_oss.cc

absl::Span<const Family* const> ServedFamilies();
absl::Span<const RefusedFamily* const> RefusedFamilies();

}  // namespace expertd
