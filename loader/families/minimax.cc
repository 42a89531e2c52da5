// MiniMax as modelopt writes it in NVFP4: w1 gate, w3 up, w2 down.
//   model.layers.{L}.block_sparse_moe.experts.{e}.w{1,2,3}.{weight,weight_scale,weight_scale_2,input_scale}

#include "loader/families/family.h"
#include "loader/families/modelopt_names.h"

namespace expertd {
namespace {

constexpr ModeloptSpelling kSpelling = {"block_sparse_moe", {"w1", "w3", "w2"}};

}  // namespace

const Family& MiniMaxFamily() {
  static constexpr Family kFamily = {
      "minimax",
      [](std::string_view tensor) { return ParseModeloptName(kSpelling, tensor); },
      [](const ExpertTensorName& name) { return ComposeModeloptName(kSpelling, name); },
  };
  return kFamily;
}

}  // namespace expertd
