#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "loader/families/family.h"

namespace expertd {

// How one of modelopt's NVFP4 schemes spells the middle of a name:
// PREFIXlayers.{L}.MODULE.experts.{e}.{PROJECTION}.{weight,weight_scale,weight_scale_2,input_scale}
struct ModeloptSpelling {
  std::string_view module;                     // "mlp", "block_sparse_moe"
  std::string_view projections[kNumMatrices];  // by Matrix: gate, up, down
};

std::optional<ExpertTensorName> ParseModeloptName(const ModeloptSpelling& spelling,
                                                  std::string_view tensor);
std::string ComposeModeloptName(const ModeloptSpelling& spelling, const ExpertTensorName& name);

// The suffixes that all modelopt NVFP4 checkpoints share.
std::optional<ExpertPart> ParseModeloptSuffix(std::string_view suffix);
std::string_view ModeloptSuffix(ExpertPart part);

}  // namespace expertd
