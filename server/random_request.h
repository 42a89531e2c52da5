#pragma once

#include <cstdint>
#include <random>

#include "config/dtype.h"
#include "expertd/v1/expertd.pb.h"

// Made-up requests for `call` and `bench`: the same seed gives the same bytes everywhere.
namespace expertd {

struct RandomRequestOptions {
  int32_t tokens = 1;
  int32_t top_k = 0;           // 0 = the layer's own
  DType dtype = DType::kBf16;  // of hidden states and output
  uint64_t seed = 0;
};

// hidden: uniform in [-2, 2) (variance 4/3, like normalised activations); each token has K
// different experts where the layer has that many, and K positive weights that add up to 1. Tensors
// as bytes.
v1::ForwardRequest MakeRandomRequest(const v1::LayerInfo& layer,
                                     const RandomRequestOptions& options);

// New ids and weights for `request`, whose num_tokens and top_k stay.
void FillRandomRouting(int32_t num_experts, std::mt19937_64& random, v1::ForwardRequest* request);

}  // namespace expertd
