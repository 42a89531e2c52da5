// gpt-oss: all experts of a layer in one tensor, gate and up rows interleaved, with biases.
//   model.layers.{L}.mlp.experts.{gate_up_proj,down_proj}_{blocks,scales,bias}. Recognised, not
//   served.

#include "loader/families/family.h"

namespace expertd {
namespace {

bool Matches(std::string_view tensor) {
  return tensor.ends_with(".mlp.experts.gate_up_proj_blocks") ||
         tensor.ends_with(".mlp.experts.down_proj_blocks");
}

}  // namespace

const RefusedFamily& GptOssFamily() {
  static constexpr RefusedFamily kFamily = {"gpt-oss", Matches};
  return kFamily;
}

}  // namespace expertd
