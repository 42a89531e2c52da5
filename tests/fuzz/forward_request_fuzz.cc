// Any bytes as a ForwardRequest: whatever is accepted can be copied into a step without reading
// outside the message.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "config/check.h"
#include "config/limits.h"
#include "expertd/v1/expertd.pb.h"
#include "server/validate.h"

namespace {

// Small enough for a fuzzer to hit: H 32, E 4, layers 0 and 3.
expertd::ServedModel Model() {
  expertd::ServedModel model;
  model.name = "m";
  model.max_tokens = 4;
  for (const int32_t layer : {0, 3}) {
    model.layers.push_back({layer, 32, 32, 4, 2, expertd::Recipe::kMxfp4, 0});
  }
  return model;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const expertd::ServedModel model = Model();
  static const auto silenced = google::protobuf::SetLogHandler(nullptr);  // of bad UTF-8
  static_cast<void>(silenced);
  expertd::v1::ForwardRequest request;
  if (!request.ParseFromArray(data, static_cast<int>(size))) return 0;
  const absl::StatusOr<expertd::RequestView> view = expertd::Validate(request, model);
  if (!view.ok()) {
    EXPERTD_CHECK(!view.status().message().empty());
    return 0;
  }
  EXPERTD_CHECK(view->num_tokens >= 0 && view->num_tokens <= model.max_tokens);
  EXPERTD_CHECK(view->top_k >= 1 && view->top_k <= expertd::limits::kMaxTopK);
  const int32_t step_top_k = expertd::limits::kMaxTopK;
  std::vector<float> hidden(static_cast<size_t>(view->num_tokens) * 32);
  std::vector<int32_t> ids(static_cast<size_t>(view->num_tokens) * step_top_k);
  std::vector<float> weights(ids.size());
  if (view->num_tokens == 0) return 0;
  view->CopyHidden(0, view->num_tokens, hidden.data());
  view->CopyRoutes(0, view->num_tokens, step_top_k, ids.data(), weights.data());
  for (const int32_t id : ids) EXPERTD_CHECK(id >= -1 && id < 4);
  return 0;
}
