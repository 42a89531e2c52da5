#include "loader/families/modelopt_names.h"

#include "absl/strings/str_cat.h"
#include "loader/families/name_cursor.h"

namespace expertd {
namespace {

constexpr std::string_view kPrefixes[] = {"model.language_model.", "language_model.model.",
                                          "model."};

}  // namespace

std::optional<ExpertPart> ParseModeloptSuffix(std::string_view suffix) {
  if (suffix == "weight") return ExpertPart::kCodes;
  if (suffix == "weight_scale") return ExpertPart::kE4m3Scales;
  if (suffix == "weight_scale_2") return ExpertPart::kSecondLevel;
  if (suffix == "input_scale") return ExpertPart::kInputScale;
  return std::nullopt;
}

std::string_view ModeloptSuffix(ExpertPart part) {
  switch (part) {
    case ExpertPart::kE4m3Scales:
      return "weight_scale";
    case ExpertPart::kSecondLevel:
      return "weight_scale_2";
    case ExpertPart::kInputScale:
      return "input_scale";
    default:
      return "weight";
  }
}

std::optional<ExpertTensorName> ParseModeloptName(const ModeloptSpelling& spelling,
                                                  std::string_view tensor) {
  ExpertTensorName name;
  NameCursor cursor(tensor);
  for (const std::string_view prefix : kPrefixes) {
    if (cursor.Eat(prefix)) {
      name.prefix = tensor.substr(0, prefix.size());
      break;
    }
  }
  if (!cursor.Eat("layers.") || !cursor.EatNumber(&name.layer) || !cursor.Eat(".") ||
      !cursor.Eat(spelling.module) || !cursor.Eat(".experts.") || !cursor.EatNumber(&name.expert) ||
      !cursor.Eat(".")) {
    return std::nullopt;
  }
  for (int m = 0; m < kNumMatrices; ++m) {
    if (!cursor.Eat(spelling.projections[m])) continue;
    if (!cursor.Eat(".")) return std::nullopt;
    const std::optional<ExpertPart> part = ParseModeloptSuffix(cursor.rest());
    if (!part) return std::nullopt;
    name.matrix = static_cast<Matrix>(m);
    name.part = *part;
    return name;
  }
  return std::nullopt;
}

std::string ComposeModeloptName(const ModeloptSpelling& spelling, const ExpertTensorName& name) {
  return absl::StrCat(std::string(name.prefix), "layers.", name.layer, ".",
                      std::string(spelling.module), ".experts.", name.expert, ".",
                      std::string(spelling.projections[static_cast<int>(name.matrix)]), ".",
                      std::string(ModeloptSuffix(name.part)));
}

}  // namespace expertd
