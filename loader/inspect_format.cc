// The two faces of an InspectReport.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "loader/expert_table.h"
#include "loader/inspect.h"
#include "loader/progress.h"
#include "nlohmann/json.hpp"

namespace expertd {
namespace {

using Json = nlohmann::ordered_json;

void Line(std::string* text, const std::string& label, const std::string& value) {
  absl::StrAppend(text, absl::StrFormat("%-10s %s\n", label, value));
}

int64_t ExpertBytes(const Checkpoint& checkpoint) {
  int64_t bytes = 0;
  for (const LayerSpec& spec : checkpoint.layers()) {
    for (int m = 0; m < kNumMatrices; ++m) {
      const MatrixShape shape = ShapeOf(spec, static_cast<Matrix>(m));
      const int64_t second_level = spec.recipe == Recipe::kNvfp4 ? 4 : 0;
      bytes +=
          spec.num_experts * (shape.CodeBytes() + shape.ScaleBytes(spec.recipe) + second_level);
    }
  }
  return bytes;
}

// "43: 0-42 nvfp4, 43 mxfp4"
std::string LayersText(const Checkpoint& checkpoint) {
  std::string text;
  std::vector<int32_t> run;  // neighbours of one recipe
  const std::vector<LayerSpec>& layers = checkpoint.layers();
  for (size_t i = 0; i < layers.size(); ++i) {
    run.push_back(layers[i].layer);
    if (i + 1 < layers.size() && layers[i + 1].recipe == layers[i].recipe) continue;
    absl::StrAppend(&text, text.empty() ? "" : ", ", RangesText(run), " ",
                    std::string(RecipeName(layers[i].recipe)));
    run.clear();
  }
  return absl::StrCat(layers.size(), ": ", text);
}

void AppendModel(const Checkpoint& checkpoint, std::string* text) {
  if (checkpoint.layers().empty()) return;
  const LayerSpec& spec = checkpoint.layers().front();
  Line(text, "geometry",
       absl::StrFormat("H %d, I %d, E %d, K %d, %s", spec.hidden_size, spec.intermediate_size,
                       spec.num_experts, spec.top_k,
                       spec.swiglu_limit > 0 ? absl::StrFormat("SwiGLU limit %g", spec.swiglu_limit)
                                             : "no SwiGLU limit"));
  Line(text, "layers", LayersText(checkpoint));
  const int64_t bytes = ExpertBytes(checkpoint);
  Line(text, "experts",
       absl::StrFormat("%s in %d files, %s a layer", HumanBytes(bytes), checkpoint.files().size(),
                       HumanBytes(bytes / static_cast<int64_t>(checkpoint.layers().size()))));
}

void AppendScales(const InspectReport& report, std::string* text) {
  if (!report.verified) return;
  absl::StrAppend(text, "verified\n");
  for (const LayerScales& scales : report.scales) {
    absl::StrAppendFormat(text, "  layer %d: %d block scales from %.4g to %.4g, %d zero",
                          scales.layer, scales.blocks, scales.smallest_scale, scales.largest_scale,
                          scales.zero_blocks);
    if (scales.largest_second > 0) {
      absl::StrAppendFormat(text, "; second level %.4g to %.4g", scales.smallest_second,
                            scales.largest_second);
    }
    if (scales.input_scales > 0) {
      absl::StrAppendFormat(text, "; input scale %.4g to %.4g (not used)", scales.smallest_input,
                            scales.largest_input);
    }
    absl::StrAppend(text, "\n");
  }
}

Json LayersJson(const Checkpoint& checkpoint) {
  Json layers = Json::array();
  for (const LayerSpec& spec : checkpoint.layers()) {
    layers.push_back({{"layer", spec.layer},
                      {"recipe", RecipeName(spec.recipe)},
                      {"mtp", spec.layer >= checkpoint.num_hidden_layers()}});
  }
  return layers;
}

Json ScalesJson(const InspectReport& report) {
  Json scales = Json::array();
  for (const LayerScales& layer : report.scales) {
    scales.push_back({{"layer", layer.layer},
                      {"blocks", layer.blocks},
                      {"zero_blocks", layer.zero_blocks},
                      {"block_scale", {layer.smallest_scale, layer.largest_scale}},
                      {"second_level", {layer.smallest_second, layer.largest_second}},
                      {"input_scale", {layer.smallest_input, layer.largest_input}},
                      {"input_scales", layer.input_scales}});
  }
  return scales;
}

Json GeometryJson(const Checkpoint& checkpoint) {
  if (checkpoint.layers().empty()) return nullptr;
  const LayerSpec& spec = checkpoint.layers().front();
  return {{"hidden_size", spec.hidden_size},
          {"intermediate_size", spec.intermediate_size},
          {"num_experts", spec.num_experts},
          {"top_k", spec.top_k},
          {"num_hidden_layers", checkpoint.num_hidden_layers()},
          {"swiglu_limit", spec.swiglu_limit}};
}

}  // namespace

std::string InspectText(const InspectReport& report) {
  const Checkpoint& checkpoint = report.checkpoint;
  std::string text;
  Line(&text, "model", absl::StrCat(checkpoint.model_name(), " (", report.dir.string(), ")"));
  Line(&text, "family", checkpoint.family());
  AppendModel(checkpoint, &text);
  Line(&text, "ignored", absl::StrCat(checkpoint.ignored_tensors(), " tensors of other modules"));
  for (const std::string& note : checkpoint.notes()) Line(&text, "note", note);
  if (!report.ranks.empty()) absl::StrAppend(&text, "ranks\n");
  for (const RankShare& share : report.ranks) {
    absl::StrAppendFormat(&text, "  rank %d: experts %s, %d matrices, %s from %d files\n",
                          share.rank, share.experts.empty() ? "none" : RangesText(share.experts),
                          share.matrices, HumanBytes(share.bytes), share.files.size());
  }
  if (!report.backends.empty()) absl::StrAppend(&text, "backends\n");
  for (const BackendVerdict& verdict : report.backends) {
    absl::StrAppendFormat(&text, "  %-4s %-6s %s\n", verdict.backend, verdict.architecture,
                          verdict.can_serve ? "yes" : absl::StrCat("no: ", verdict.reason));
  }
  AppendScales(report, &text);
  if (!report.problems.empty()) {
    absl::StrAppend(&text, "problems\n");
    for (const std::string& line : report.problems.lines())
      absl::StrAppend(&text, "  ", line, "\n");
    const int64_t untold =
        report.problems.count() - static_cast<int64_t>(report.problems.lines().size());
    if (untold > 0) absl::StrAppend(&text, "  and ", untold, " more\n");
  }
  Line(&text, "verdict",
       report.CanBeServed()
           ? "can be served"
           : absl::StrCat("cannot be served: ", report.problems.count(),
                          report.problems.count() == 1 ? " problem" : " problems"));
  return text;
}

std::string InspectJson(const InspectReport& report) {
  const Checkpoint& checkpoint = report.checkpoint;
  Json files = Json::array(), ranks = Json::array(), backends = Json::array();
  for (const CheckpointFile& file : checkpoint.files()) {
    files.push_back({{"name", file.path.filename().string()}, {"bytes", file.identity.bytes}});
  }
  for (const RankShare& share : report.ranks) {
    ranks.push_back({{"rank", share.rank},
                     {"experts", share.experts},
                     {"matrices", share.matrices},
                     {"bytes", share.bytes},
                     {"files", share.files}});
  }
  for (const BackendVerdict& verdict : report.backends) {
    backends.push_back({{"backend", verdict.backend},
                        {"architecture", verdict.architecture},
                        {"can_serve", verdict.can_serve},
                        {"reason", verdict.reason}});
  }
  Json document = {{"directory", report.dir.string()},
                   {"model", checkpoint.model_name()},
                   {"family", checkpoint.family()},
                   {"can_be_served", report.CanBeServed()},
                   {"geometry", GeometryJson(checkpoint)},
                   {"layers", LayersJson(checkpoint)},
                   {"expert_bytes", ExpertBytes(checkpoint)},
                   {"ignored_tensors", checkpoint.ignored_tensors()},
                   {"files", files},
                   {"ranks", ranks},
                   {"backends", backends},
                   {"notes", checkpoint.notes()}};
  if (report.verified) document["scales"] = ScalesJson(report);
  document["num_problems"] = report.problems.count();
  document["problems"] = report.problems.lines();
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace expertd
