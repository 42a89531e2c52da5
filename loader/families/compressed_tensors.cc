// compressed-tensors (llm-compressor): ....experts.{e}.{proj}.weight_packed beside weight_scale
// and, for NVFP4, weight_global_scale, which divides. Recognised, not served.

#include "loader/families/family.h"

namespace expertd {
namespace {

bool Matches(std::string_view tensor) {
  return tensor.find(".experts.") != std::string_view::npos && tensor.ends_with(".weight_packed");
}

}  // namespace

const RefusedFamily& CompressedTensorsFamily() {
  static constexpr RefusedFamily kFamily = {"compressed-tensors", Matches};
  return kFamily;
}

}  // namespace expertd
