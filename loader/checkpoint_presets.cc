#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "loader/checkpoint_writer.h"

namespace expertd {

const std::vector<CheckpointPreset>& CheckpointPresets() {
  constexpr auto kV4 = CheckpointStyle::kDeepSeekV4;
  constexpr auto kQwen = CheckpointStyle::kQwen3;
  constexpr auto kMx = Recipe::kMxfp4;
  constexpr auto kNv = Recipe::kNvfp4;
  static const std::vector<CheckpointPreset> presets = {
      {"tiny", "a toy that loads at once", kV4, kMx, 256, 128, 8, 2, 2},
      {"flash", "DeepSeek-V4-Flash", kV4, kMx, 4096, 2048, 256, 6, 43},
      {"pro", "DeepSeek-V4-Pro", kV4, kMx, 7168, 3072, 384, 6, 61},
      {"v3", "DeepSeek-V3 geometry, DeepSeek-V4 names", kV4, kMx, 7168, 2048, 256, 8, 58},
      {"gptoss-shaped", "gpt-oss-120b geometry, DeepSeek-V4 names", kV4, kMx, 2880, 2880, 128, 4,
       36},
      {"qwen3", "Qwen3-235B", kQwen, kNv, 4096, 1536, 128, 8, 94},
  };
  return presets;
}

absl::StatusOr<CheckpointRequest> RequestFromPreset(std::string_view name) {
  std::vector<std::string> names;
  for (const CheckpointPreset& preset : CheckpointPresets()) {
    names.emplace_back(preset.name);
    if (preset.name != name) continue;
    CheckpointRequest request;
    request.style = preset.style;
    request.recipe = preset.recipe;
    request.hidden_size = preset.hidden_size;
    request.intermediate_size = preset.intermediate_size;
    request.num_experts = preset.num_experts;
    request.top_k = preset.top_k;
    request.num_hidden_layers = preset.num_layers;
    request.layers.resize(preset.num_layers);
    std::iota(request.layers.begin(), request.layers.end(), 0);
    return request;
  }
  return absl::InvalidArgumentError(absl::StrCat("preset: got ", std::string(name),
                                                 ", expected one of ", absl::StrJoin(names, ", ")));
}

}  // namespace expertd
