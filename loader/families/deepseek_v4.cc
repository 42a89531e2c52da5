// DeepSeek-V4 Flash and Pro: w1 gate, w3 up, w2 down; `mtp.{n}` beside `layers.{L}`; a `model.`
// prefix may be present.
//   layers.{L}.ffn.experts.{e}.w{1,2,3}.{weight,scale}                                       MXFP4
//   layers.{L}.ffn.experts.{e}.w{1,2,3}.{weight,weight_scale,weight_scale_2,input_scale}     NVFP4
//   (modelopt)

#include "absl/strings/str_cat.h"
#include "loader/families/family.h"
#include "loader/families/modelopt_names.h"
#include "loader/families/name_cursor.h"

namespace expertd {
namespace {

constexpr std::string_view kMxfp4Scale = "scale";
constexpr std::string_view kMatrixNames[kNumMatrices] = {"w1", "w3", "w2"};

std::optional<ExpertTensorName> Parse(std::string_view tensor) {
  ExpertTensorName name;
  NameCursor cursor(tensor);
  if (cursor.Eat("model.")) name.prefix = tensor.substr(0, 6);
  name.mtp = cursor.Eat("mtp.");
  if (!name.mtp && !cursor.Eat("layers.")) return std::nullopt;
  if (!cursor.EatNumber(&name.layer) || !cursor.Eat(".ffn.experts.") ||
      !cursor.EatNumber(&name.expert) || !cursor.Eat(".")) {
    return std::nullopt;
  }
  for (int m = 0; m < kNumMatrices; ++m) {
    if (!cursor.Eat(kMatrixNames[m])) continue;
    if (!cursor.Eat(".")) return std::nullopt;
    const std::optional<ExpertPart> part = cursor.rest() == kMxfp4Scale
                                               ? ExpertPart::kUe8m0Scales
                                               : ParseModeloptSuffix(cursor.rest());
    if (!part) return std::nullopt;
    name.matrix = static_cast<Matrix>(m);
    name.part = *part;
    return name;
  }
  return std::nullopt;
}

std::string Compose(const ExpertTensorName& name) {
  return absl::StrCat(
      std::string(name.prefix), name.mtp ? "mtp." : "layers.", name.layer, ".ffn.experts.",
      name.expert, ".", std::string(kMatrixNames[static_cast<int>(name.matrix)]), ".",
      std::string(name.part == ExpertPart::kUe8m0Scales ? kMxfp4Scale : ModeloptSuffix(name.part)));
}

}  // namespace

const Family& DeepSeekV4Family() {
  static constexpr Family kFamily = {"deepseek-v4", Parse, Compose};
  return kFamily;
}

}  // namespace expertd
