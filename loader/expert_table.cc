#include "loader/expert_table.h"

#include <algorithm>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/limits.h"
#include "loader/text.h"

namespace expertd {
namespace {

constexpr ExpertPart ScalesOf(Recipe recipe) {
  return recipe == Recipe::kMxfp4 ? ExpertPart::kUe8m0Scales : ExpertPart::kE4m3Scales;
}

// What a part must look like; an empty shape stands for a scalar, [] or [1].
struct Expectation {
  std::vector<TensorType> types;
  std::vector<uint64_t> shape;
};

Expectation Expect(ExpertPart part, const MatrixShape& matrix) {
  const auto out = static_cast<uint64_t>(matrix.out);
  const auto in = static_cast<uint64_t>(matrix.in);
  switch (part) {
    case ExpertPart::kCodes:
      return {{TensorType::kU8, TensorType::kI8}, {out, in / 2}};
    case ExpertPart::kUe8m0Scales:
      return {{TensorType::kF8E8M0, TensorType::kU8}, {out, in / 32}};
    case ExpertPart::kE4m3Scales:
      return {{TensorType::kF8E4M3}, {out, in / 16}};
    default:
      return {{TensorType::kF32}, {}};
  }
}

std::string TypesText(const std::vector<TensorType>& types) {
  return absl::StrJoin(types, " or ", [](std::string* out, TensorType type) {
    absl::StrAppend(out, std::string(TensorTypeName(type)));
  });
}

std::string ExpectationText(const Expectation& expected) {
  return absl::StrCat(TypesText(expected.types), " ", ShapeText(expected.shape));
}

std::string TensorText(const TensorInfo& tensor) {
  return absl::StrCat(std::string(TensorTypeName(tensor.type)), " ", ShapeText(tensor.shape));
}

}  // namespace

bool NamesExperts(std::string_view tensor) {
  return tensor.find(".experts.") != std::string_view::npos;
}

std::string RangesText(const std::vector<int32_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    absl::StrAppend(&text, text.empty() ? "" : ", ", numbers[i]);
    if (last > i) absl::StrAppend(&text, "-", numbers[last]);
    i = last + 1;
  }
  return text;
}

ExpertTable::ExpertTable(const ModelConfig* config, const CheckpointOptions& options,
                         Problems* problems)
    : config_(config), options_(options), problems_(problems) {
  if (config_ == nullptr || options_.experts.empty()) return;
  needed_expert_.resize(static_cast<size_t>(config_->num_experts));
  for (const int32_t expert : options_.experts) {
    if (expert >= 0 && expert < config_->num_experts) {
      needed_expert_[static_cast<size_t>(expert)] = true;
    }
  }
}

bool ExpertTable::Take(const TensorInfo& tensor, int32_t file, const std::string& file_name) {
  if (!NamesExperts(tensor.name)) {
    ++ignored_;
    return false;
  }
  for (const RefusedFamily* family : RefusedFamilies()) {
    if (!family->matches(tensor.name)) continue;
    if (refused_ == nullptr) refused_ = family;
    return true;
  }
  for (const Family* family : ServedFamilies()) {
    const std::optional<ExpertTensorName> name = family->parse(tensor.name);
    if (!name) continue;
    if (scheme_ == nullptr) {
      scheme_ = family;
      scheme_example_ = tensor.name;
      prefix_ = std::string(name->prefix);
    }
    if (scheme_ != family || prefix_ != name->prefix) {
      problems_->Add(absl::StrCat("tensor ", Printable(tensor.name), " in ", file_name,
                                  ": name: found another scheme than ", scheme_example_,
                                  ", expected one for all"));
    } else if (config_ != nullptr) {
      TakeExpert(*name, tensor, file, file_name);
    }
    return true;
  }
  if (unknown_example_.empty()) {
    unknown_example_ = absl::StrCat("tensor ", Printable(tensor.name), " in ", file_name, ", ",
                                    TensorText(tensor));
  }
  ++ignored_;
  return true;
}

int32_t ExpertTable::LayerNumber(const ExpertTensorName& name) const {
  return name.mtp ? config_->num_hidden_layers + name.layer : name.layer;
}

void ExpertTable::TakeExpert(const ExpertTensorName& name, const TensorInfo& tensor, int32_t file,
                             const std::string& file_name) {
  const std::string where = absl::StrCat("tensor ", tensor.name, " in ", file_name);
  if (name.layer >= limits::kMaxLayers) {
    problems_->Add(absl::StrCat(where, ": layer: found ", name.layer, ", expected below ",
                                limits::kMaxLayers));
    return;
  }
  // layers.N from num_hidden_layers on would be taken for mtp.n.
  if (scheme_ == &DeepSeekV4Family() && !name.mtp && name.layer >= config_->num_hidden_layers) {
    problems_->Add(
        absl::StrCat(where, ": layer: found ", name.layer,
                     ", expected below num_hidden_layers = ", config_->num_hidden_layers));
    return;
  }
  const int32_t number = LayerNumber(name);
  if (number < options_.first_layer || (options_.last_layer >= 0 && number > options_.last_layer)) {
    return;
  }
  Layer& layer = found_[number];
  if (name.expert >= config_->num_experts) {
    layer.problems.Add(absl::StrCat(where, ": expert: found ", name.expert, ", expected below ",
                                    config_->experts_key, " = ", config_->num_experts));
    return;
  }
  if (layer.matrices.empty()) {
    layer.matrices.resize(static_cast<size_t>(config_->num_experts) * kNumMatrices);
  }
  ++layer.counts[static_cast<size_t>(name.part)];
  FileRange& range =
      layer.matrices[static_cast<size_t>(name.expert) * kNumMatrices +
                     static_cast<size_t>(name.matrix)][static_cast<size_t>(name.part)];
  // Marked as present even when it is wrong: one problem, not two.
  range = FileRange{.file = file, .offset = tensor.offset, .bytes = tensor.bytes};
  CheckTensor(name, tensor, where, &layer);
}

void ExpertTable::CheckTensor(const ExpertTensorName& name, const TensorInfo& tensor,
                              const std::string& where, Layer* layer) const {
  const Expectation expected =
      Expect(name.part, ShapeOf(SpecOf(LayerNumber(name), Recipe::kMxfp4), name.matrix));
  const bool type_good =
      std::find(expected.types.begin(), expected.types.end(), tensor.type) != expected.types.end();
  const bool shape_good = tensor.shape == expected.shape ||
                          (expected.shape.empty() && tensor.shape == std::vector<uint64_t>{1});
  if (type_good && shape_good) return;
  if (name.part == ExpertPart::kCodes && !type_good) {
    ++layer->foreign;
    if (layer->foreign_example.empty()) {
      layer->foreign_example = absl::StrCat(std::string(TensorTypeName(tensor.type)), " (", where,
                                            ", ", ShapeText(tensor.shape), ")");
    }
  }
  std::string text = where;
  if (!type_good) {
    absl::StrAppend(&text, ": dtype: found ", std::string(TensorTypeName(tensor.type)),
                    ", expected ", TypesText(expected.types));
  }
  if (!shape_good) {
    absl::StrAppend(&text, ": shape: found ", ShapeText(tensor.shape), ", expected ",
                    ShapeText(expected.shape));
  }
  layer->problems.Add(std::move(text));
}

void ExpertTable::Finish(bool complete) {
  if (refused_ != nullptr) {
    std::string format;
    if (config_ != nullptr && !config_->quant_format.empty()) {
      format = absl::StrCat(" (", Printable(config_->quant_format), ")");
    }
    problems_->Add(absl::StrCat("family: found ", std::string(refused_->name), format,
                                ", which is not served yet"));
    return;
  }
  if (scheme_ == nullptr) {
    if (!complete) return;
    problems_->Add(unknown_example_.empty()
                       ? "routed experts: found none, expected tensors such as "
                         "layers.0.ffn.experts.0.w1.weight or "
                         "model.layers.0.mlp.experts.0.gate_proj.weight"
                       : absl::StrCat("routed experts: found ", unknown_example_,
                                      ", expected an FP4 layout that is served"));
    return;
  }
  if (config_ == nullptr) return;
  CheckRange();
  if (ExplainNotFp4()) return;
  CheckScheme();
  CheckLayerNumbers(complete);
  for (auto& [number, layer] : found_) FinishLayer(number, complete, &layer);
}

void ExpertTable::CheckRange() {
  if (options_.last_layer >= 0 && options_.first_layer > options_.last_layer) {
    problems_->Add(absl::StrCat("--layers: found ", options_.first_layer, "-", options_.last_layer,
                                ", expected the first not above the last"));
  }
}

// True if no layer is FP4, which is told in one line rather than once a tensor.
bool ExpertTable::ExplainNotFp4() {
  std::string example;
  for (const auto& [number, layer] : found_) {
    if (layer.foreign < layer.counts[static_cast<size_t>(ExpertPart::kCodes)] ||
        layer.foreign == 0) {
      return false;
    }
    if (example.empty()) example = layer.foreign_example;
  }
  if (example.empty()) return false;
  std::string text =
      absl::StrCat("routed experts: found ", example, ", expected FP4: U8 or I8, two codes a byte");
  if (!config_->expert_dtype.empty()) {
    absl::StrAppend(&text, " (config.json: expert_dtype is ", Printable(config_->expert_dtype),
                    ")");
  }
  problems_->Add(std::move(text));
  return true;
}

void ExpertTable::CheckScheme() {
  if (config_->expert_dtype.empty() || config_->expert_dtype == "fp4") return;
  problems_->Add(absl::StrCat("config.json: expert_dtype: found ", Printable(config_->expert_dtype),
                              ", expected fp4 as the tensors are"));
}

// Layers without experts and numbers that config.json does not know.
void ExpertTable::CheckLayerNumbers(bool complete) {
  const int32_t hidden = config_->num_hidden_layers;
  int32_t total = hidden + config_->num_mtp_layers;
  std::vector<int32_t> beyond;
  for (const auto& [number, layer] : found_) {
    // mtp.n says what it is, whatever num_nextn_predict_layers counts; layers.N does not.
    if (number >= total && scheme_ != &DeepSeekV4Family()) beyond.push_back(number);
    if (scheme_ == &DeepSeekV4Family()) total = std::max(total, number + 1);
  }
  if (!beyond.empty()) {
    problems_->Add(absl::StrCat("layers ", RangesText(beyond),
                                ": found routed experts, expected "
                                "layers below num_hidden_layers + num_nextn_predict_layers = ",
                                total));
  }
  const int32_t last = options_.last_layer >= 0 ? options_.last_layer : total - 1;
  if (last >= total || options_.first_layer >= total) {
    const std::string end = options_.last_layer >= 0 ? absl::StrCat(last) : "";
    problems_->Add(absl::StrCat("--layers: found ", options_.first_layer, "-", end,
                                ", expected layers from 0 to ", total - 1));
  }
  if (!complete) return;
  std::vector<int32_t> missing, absent_mtp;
  for (int32_t number = options_.first_layer; number <= std::min(last, total - 1); ++number) {
    if (found_.contains(number)) continue;
    if (number >= hidden) {
      (options_.last_layer >= 0 ? missing : absent_mtp).push_back(number);
    } else if (config_->is_moe[static_cast<size_t>(number)]) {
      missing.push_back(number);
    }
  }
  if (!missing.empty()) {
    problems_->Add(absl::StrCat(
        "layers ", RangesText(missing), ": no routed experts, expected them in every layer from ",
        options_.first_layer, " to ", last,
        " that config.json does not call dense (--layers A-B serves a part)"));
  }
  if (!absent_mtp.empty()) {
    notes_.push_back(absl::StrCat("layers ", RangesText(absent_mtp),
                                  " (multi-token prediction): not in the checkpoint, not served"));
  }
}

void ExpertTable::FinishLayer(int32_t number, bool complete, Layer* layer) {
  const int64_t codes = layer->counts[static_cast<size_t>(ExpertPart::kCodes)];
  if (layer->foreign > 0 && layer->foreign == codes) {
    std::string text = absl::StrCat("layer ", number, ": experts are ", layer->foreign_example,
                                    ", expected FP4: U8 or I8, two codes a byte");
    // Quantisers leave multi-token prediction alone; that stops nobody who did not ask for it.
    if (IsMtp(number) && options_.last_layer < 0) {
      notes_.push_back(absl::StrCat(text, "; multi-token prediction, not served"));
    } else {
      problems_->Add(std::move(text));
    }
    return;
  }
  for (const std::string& line : layer->problems.lines()) problems_->Add(line);
  problems_->AddUntold(layer->problems.count() -
                       static_cast<int64_t>(layer->problems.lines().size()));
  if (layer->matrices.empty()) return;

  const int64_t ue8m0 = layer->counts[static_cast<size_t>(ExpertPart::kUe8m0Scales)];
  const int64_t e4m3 = layer->counts[static_cast<size_t>(ExpertPart::kE4m3Scales)];
  const bool by_scheme = ue8m0 == 0 && e4m3 == 0 && scheme_ == &DeepSeekV4Family();
  const Recipe recipe = ue8m0 > e4m3 || by_scheme ? Recipe::kMxfp4 : Recipe::kNvfp4;
  if (complete) ListMissing(number, recipe, *layer);

  layers_.push_back(SpecOf(number, recipe));
  std::vector<MatrixLocation>& locations = locations_[number];
  locations.reserve(layer->matrices.size());
  for (const Parts& parts : layer->matrices) {
    const auto at = [&](ExpertPart part) { return parts[static_cast<size_t>(part)]; };
    MatrixLocation location{.codes = at(ExpertPart::kCodes), .scales = at(ScalesOf(recipe))};
    if (recipe == Recipe::kNvfp4) {
      location.second_level = at(ExpertPart::kSecondLevel);
      location.input_scale = at(ExpertPart::kInputScale);
    }
    locations.push_back(location);
  }
  layer->matrices = {};
}

// Every expert needs weight, block scale and (NVFP4) second level of w1, w2 and w3, of one recipe.
void ExpertTable::ListMissing(int32_t number, Recipe recipe, const Layer& layer) {
  std::vector<ExpertPart> needed = {ExpertPart::kCodes, ScalesOf(recipe)};
  std::vector<ExpertPart> forbidden = {
      ScalesOf(recipe == Recipe::kMxfp4 ? Recipe::kNvfp4 : Recipe::kMxfp4)};
  (recipe == Recipe::kNvfp4 ? needed : forbidden).push_back(ExpertPart::kSecondLevel);

  std::vector<int32_t> absent;
  for (int32_t expert = 0; expert < config_->num_experts; ++expert) {
    if (!needed_expert_.empty() && !needed_expert_[static_cast<size_t>(expert)]) continue;
    const Parts* matrices = &layer.matrices[static_cast<size_t>(expert) * kNumMatrices];
    bool any = false;
    for (int m = 0; m < kNumMatrices; ++m) {
      for (const FileRange& range : matrices[m]) any = any || range.file >= 0;
    }
    if (!any) {
      absent.push_back(expert);
      continue;
    }
    for (int m = 0; m < kNumMatrices; ++m) {
      const auto matrix = static_cast<Matrix>(m);
      const MatrixShape shape = ShapeOf(SpecOf(number, recipe), matrix);
      for (const ExpertPart part : needed) {
        if (matrices[m][static_cast<size_t>(part)].file >= 0) continue;
        problems_->Add(absl::StrCat("tensor ", NameOf(number, expert, matrix, part),
                                    ": missing, expected ", ExpectationText(Expect(part, shape))));
      }
      for (const ExpertPart part : forbidden) {
        if (matrices[m][static_cast<size_t>(part)].file < 0) continue;
        problems_->Add(absl::StrCat("tensor ", NameOf(number, expert, matrix, part),
                                    ": found in a layer that is otherwise ",
                                    std::string(RecipeName(recipe)), ", expected none"));
      }
    }
  }
  if (!absent.empty()) {
    problems_->Add(absl::StrCat("layer ", number, ": experts ", RangesText(absent),
                                ": missing with all their tensors, expected ", config_->experts_key,
                                " = ", config_->num_experts));
  }
}

LayerSpec ExpertTable::SpecOf(int32_t number, Recipe recipe) const {
  return LayerSpec{.layer = number,
                   .hidden_size = config_->hidden_size,
                   .intermediate_size = config_->intermediate_size,
                   .num_experts = config_->num_experts,
                   .top_k = config_->top_k,
                   .recipe = recipe,
                   .swiglu_limit = config_->swiglu_limit};
}

std::string ExpertTable::NameOf(int32_t number, int32_t expert, Matrix matrix,
                                ExpertPart part) const {
  const bool mtp = scheme_ == &DeepSeekV4Family() && IsMtp(number);
  return scheme_->compose({.prefix = prefix_,
                           .mtp = mtp,
                           .layer = mtp ? number - config_->num_hidden_layers : number,
                           .expert = expert,
                           .matrix = matrix,
                           .part = part});
}

std::string ExpertTable::FamilyText() const {
  if (refused_ != nullptr) return std::string(refused_->name);
  if (scheme_ == nullptr) return "unknown";
  std::set<std::string> recipes, mtp_recipes;
  for (const LayerSpec& spec : layers_) {
    (IsMtp(spec.layer) ? mtp_recipes : recipes).insert(std::string(RecipeName(spec.recipe)));
  }
  std::string text = absl::StrJoin(recipes, ", ");
  if (recipes.empty()) {
    text = absl::StrJoin(mtp_recipes, ", ");
  } else if (!mtp_recipes.empty() && mtp_recipes != recipes) {
    absl::StrAppend(&text, ", mtp ", absl::StrJoin(mtp_recipes, ", "));
  }
  return absl::StrCat(std::string(scheme_->name),
                      text.empty() ? "" : absl::StrCat(" (", text, ")"));
}

}  // namespace expertd
