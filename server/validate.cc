#include "server/validate.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "config/limits.h"

namespace expertd {
namespace {

constexpr int64_t kSmallFields = 64 << 10;

// One row of a message in its largest form. An id given as a number takes up to ten bytes (a
// negative varint), a weight four.
int64_t TokenBytes(int64_t hidden_size) { return hidden_size * 4 + limits::kMaxTopK * 14; }

absl::Status Invalid(const char* field, const std::string& found, const std::string& expected) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": found ", found, ", expected ", expected));
}

// [T, columns] given as bytes or as numbers, never both; with no elements neither is needed.
absl::Status CheckTensor(const char* bytes_field, const char* values_field, int64_t num_bytes,
                         int64_t num_values, const std::string& shape, int64_t elements,
                         int64_t element_bytes) {
  if (num_bytes > 0 && num_values > 0) {
    return Invalid(bytes_field, absl::StrCat("bytes and also ", values_field), "one of the two");
  }
  if (num_values > 0 && num_values != elements) {
    return Invalid(values_field, absl::StrCat(num_values, " numbers"),
                   absl::StrCat(elements, " = ", shape));
  }
  if (num_values == 0 && num_bytes != elements * element_bytes) {
    return Invalid(bytes_field, absl::StrCat(num_bytes, " bytes"),
                   absl::StrCat(elements * element_bytes, " = ", shape, " of ", element_bytes,
                                " bytes (or ", values_field, ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<DType> ToDType(const char* field, v1::DType dtype, DType unspecified) {
  switch (dtype) {
    case v1::DTYPE_UNSPECIFIED:
      return unspecified;
    case v1::DTYPE_BF16:
      return DType::kBf16;
    case v1::DTYPE_F32:
      return DType::kF32;
    default:
      return Invalid(field, absl::StrCat(static_cast<int>(dtype)), "DTYPE_BF16 or DTYPE_F32");
  }
}

absl::Status CheckIds(const RequestView& view, int32_t num_experts) {
  const char* ids = static_cast<const char*>(view.expert_ids);
  for (int64_t i = 0; i < int64_t{view.num_tokens} * view.top_k; ++i) {
    int32_t id;
    std::memcpy(&id, ids + i * 4, 4);
    if (id < -1 || id >= num_experts) {
      return Invalid("expert_ids",
                     absl::StrCat(id, " at token ", i / view.top_k, " choice ", i % view.top_k),
                     absl::StrCat("-1 (masked) or 0 to ", num_experts - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckShape(const v1::ForwardRequest& request, const LayerSpec& layer,
                        int32_t max_tokens) {
  if (request.num_tokens() < 0) {
    return Invalid("num_tokens", absl::StrCat(request.num_tokens()),
                   absl::StrCat("0 to ", max_tokens));
  }
  if (request.num_tokens() > max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_tokens: got ", request.num_tokens(), " tokens, the buffer is sized for ", max_tokens));
  }
  if (request.hidden_size() != layer.hidden_size) {
    return Invalid("hidden_size", absl::StrCat(request.hidden_size()),
                   absl::StrCat(layer.hidden_size));
  }
  if (request.top_k() < 1 || request.top_k() > limits::kMaxTopK) {
    return Invalid("top_k", absl::StrCat(request.top_k()), absl::StrCat("1 to ", limits::kMaxTopK));
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(const v1::ForwardRequest& request, DType input_dtype) {
  const int64_t tokens = request.num_tokens();
  const std::string hidden_shape = absl::StrCat("T ", tokens, " x H ", request.hidden_size());
  const std::string route_shape = absl::StrCat("T ", tokens, " x K ", request.top_k());
  absl::Status status = CheckTensor("hidden_states", "hidden_values",
                                    static_cast<int64_t>(request.hidden_states().size()),
                                    request.hidden_values_size(), hidden_shape,
                                    tokens * request.hidden_size(), DTypeBytes(input_dtype));
  if (!status.ok()) return status;
  status = CheckTensor("expert_ids", "expert_id_values",
                       static_cast<int64_t>(request.expert_ids().size()),
                       request.expert_id_values_size(), route_shape, tokens * request.top_k(), 4);
  if (!status.ok()) return status;
  return CheckTensor("routing_weights", "routing_weight_values",
                     static_cast<int64_t>(request.routing_weights().size()),
                     request.routing_weight_values_size(), route_shape, tokens * request.top_k(),
                     4);
}

// Of one row while its request is in flight: input and output elements, ids and weights.
int64_t HeldTokenBytes(int64_t hidden_size, int64_t element_bytes, int64_t top_k) {
  return hidden_size * element_bytes + top_k * 8;
}

RequestView MakeView(const v1::ForwardRequest& request, const BatchKey& key) {
  RequestView view;
  view.key = key;
  view.num_tokens = request.num_tokens();
  view.top_k = request.top_k();
  view.hidden_size = request.hidden_size();
  view.as_numbers = request.hidden_values_size() > 0;
  if (view.as_numbers) {
    view.hidden_values = request.hidden_values().data();
  } else {
    view.hidden_bytes = request.hidden_states().data();
  }
  view.expert_ids = request.expert_id_values_size() > 0
                        ? static_cast<const void*>(request.expert_id_values().data())
                        : request.expert_ids().data();
  view.routing_weights = request.routing_weight_values_size() > 0
                             ? static_cast<const void*>(request.routing_weight_values().data())
                             : request.routing_weights().data();
  const int64_t element_bytes =
      view.as_numbers ? 8 : DTypeBytes(key.input_dtype) + DTypeBytes(key.output_dtype);
  view.held_bytes = view.num_tokens * HeldTokenBytes(view.hidden_size, element_bytes, view.top_k);
  return view;
}

}  // namespace

const LayerSpec* ServedModel::Find(int32_t layer) const {
  const auto found = std::lower_bound(layers.begin(), layers.end(), layer,
                                      [](const LayerSpec& a, int32_t b) { return a.layer < b; });
  return found != layers.end() && found->layer == layer ? &*found : nullptr;
}

std::string ServedModel::LayerList() const {
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t last = i;
    while (last + 1 < layers.size() && layers[last + 1].layer == layers[last].layer + 1) ++last;
    absl::StrAppend(&text, text.empty() ? "" : ", ", layers[i].layer);
    if (last > i) absl::StrAppend(&text, "-", layers[last].layer);
    i = last + 1;
  }
  return text;
}

int32_t MaxRequestTokens(int64_t wanted, int64_t hidden_size, int64_t max_inflight_bytes) {
  const int64_t by_message = (limits::kMaxMessageBytes - kSmallFields) / TokenBytes(hidden_size);
  const int64_t by_inflight = max_inflight_bytes / HeldTokenBytes(hidden_size, 8, limits::kMaxTopK);
  return static_cast<int32_t>(std::min({wanted, by_message, by_inflight}));
}

int64_t MaxMessageBytes(const ServedModel& model) {
  return model.max_tokens * TokenBytes(model.layers.front().hidden_size) + kSmallFields;
}

absl::StatusOr<RequestView> Validate(const v1::ForwardRequest& request, const ServedModel& model) {
  if (!request.model().empty() && request.model() != model.name) {
    return absl::NotFoundError(absl::StrCat("model: found \"", request.model(), "\", expected \"",
                                            model.name, "\" or none"));
  }
  const LayerSpec* layer = model.Find(request.layer());
  if (layer == nullptr) {
    return absl::NotFoundError(absl::StrCat("layer: found ", request.layer(),
                                            ", expected one of the served layers ",
                                            model.LayerList()));
  }
  absl::Status status = CheckShape(request, *layer, model.max_tokens);
  if (!status.ok()) return status;

  const bool as_numbers = request.hidden_values_size() > 0;
  const DType unspecified = as_numbers ? DType::kF32 : DType::kBf16;
  const absl::StatusOr<DType> input = ToDType("hidden_dtype", request.hidden_dtype(), unspecified);
  if (!input.ok()) return input.status();
  const absl::StatusOr<DType> output = ToDType("output_dtype", request.output_dtype(), unspecified);
  if (!output.ok()) return output.status();
  status = CheckTensors(request, *input);
  if (!status.ok()) return status;

  const RequestView view = MakeView(request, BatchKey{layer->layer, *input, *output});
  status = CheckIds(view, layer->num_experts);
  if (!status.ok()) return status;
  return view;
}

}  // namespace expertd
