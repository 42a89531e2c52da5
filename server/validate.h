#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "config/model_spec.h"
#include "expertd/v1/expertd.pb.h"
#include "server/request.h"

namespace expertd {

// What requests are held against. Immutable once the model is known.
struct ServedModel {
  std::string name;
  std::vector<LayerSpec> layers;  // ascending by layer
  int32_t max_tokens = 0;         // of one request

  const LayerSpec* Find(int32_t layer) const;
  std::string LayerList() const;  // "0-3, 7"
};

// At most `wanted`, and so many that a message of F32 rows stays below limits::kMaxMessageBytes and
// that one such request alone fits into max_inflight_bytes. 0: not even one row does.
int32_t MaxRequestTokens(int64_t wanted, int64_t hidden_size, int64_t max_inflight_bytes);

// The largest message that a valid request or its answer can be, with room for the small fields.
int64_t MaxMessageBytes(const ServedModel& model);

// Pure. The view points into `request`. INVALID_ARGUMENT or NOT_FOUND name the field, what was
// found and what was expected. NaN and infinite hidden states and weights are the caller's affair
// and pass.
absl::StatusOr<RequestView> Validate(const v1::ForwardRequest& request, const ServedModel& model);

}  // namespace expertd
