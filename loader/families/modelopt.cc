// Qwen3 MoE, GLM, DeepSeek-R1, Kimi and others as NVIDIA's modelopt writes them in NVFP4:
//   model.layers.{L}.mlp.experts.{e}.{gate,up,down}_proj.{weight,weight_scale,weight_scale_2,input_scale}
// Multi-token-prediction layers are numbered on from num_hidden_layers.

#include "loader/families/family.h"
#include "loader/families/modelopt_names.h"

namespace expertd {
namespace {

constexpr ModeloptSpelling kSpelling = {"mlp", {"gate_proj", "up_proj", "down_proj"}};

}  // namespace

const Family& ModeloptFamily() {
  static constexpr Family kFamily = {
      "modelopt",
      [](std::string_view tensor) { return ParseModeloptName(kSpelling, tensor); },
      [](const ExpertTensorName& name) { return ComposeModeloptName(kSpelling, name); },
  };
  return kFamily;
}

}  // namespace expertd
