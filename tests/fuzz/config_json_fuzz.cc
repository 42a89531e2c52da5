// Any bytes as config.json, or as config.json and hf_quant_config.json with a line of --- between
// them: whatever is accepted is inside config/limits.h.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "config/check.h"
#include "config/limits.h"
#include "config/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace limits = expertd::limits;
  constexpr std::string_view kSeparator = "\n---\n";
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t cut = text.find(kSeparator);
  const auto model =
      cut == std::string_view::npos
          ? expertd::ParseModelConfig(text)
          : expertd::ParseModelConfig(text.substr(0, cut), text.substr(cut + kSeparator.size()));
  if (!model.ok()) {
    EXPERTD_CHECK(!model.status().message().empty());
    return 0;
  }
  EXPERTD_CHECK(model->hidden_size > 0 && model->hidden_size <= limits::kMaxHiddenSize);
  EXPERTD_CHECK(model->hidden_size % limits::kGeometryMultiple == 0);
  EXPERTD_CHECK(model->intermediate_size > 0 &&
                model->intermediate_size <= limits::kMaxIntermediateSize);
  EXPERTD_CHECK(model->intermediate_size % limits::kGeometryMultiple == 0);
  EXPERTD_CHECK(model->num_experts > 0 && model->num_experts <= limits::kMaxExperts);
  EXPERTD_CHECK(model->top_k > 0 && model->top_k <= model->num_experts);
  EXPERTD_CHECK(model->num_hidden_layers > 0 && model->num_hidden_layers <= limits::kMaxLayers);
  EXPERTD_CHECK(model->is_moe.size() == static_cast<size_t>(model->num_hidden_layers));
  EXPERTD_CHECK(model->swiglu_limit >= 0);
  return 0;
}
