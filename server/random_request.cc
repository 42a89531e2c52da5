#include "server/random_request.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/formats.h"

namespace expertd {
namespace {

// [0, 1) from the top 24 bits: the standard distributions differ between libraries.
float UniformFloat(std::mt19937_64& random) {
  return static_cast<float>(random() >> 40) * 0x1p-24f;
}

template <typename T>
void AppendLittleEndian(T value, std::string* bytes) {
  static_assert(std::endian::native == std::endian::little);
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string RandomHidden(int64_t count, DType dtype, std::mt19937_64& random) {
  std::string bytes;
  bytes.reserve(static_cast<size_t>(count * DTypeBytes(dtype)));
  for (int64_t i = 0; i < count; ++i) {
    const float value = 4.0f * UniformFloat(random) - 2.0f;
    if (dtype == DType::kBf16) {
      AppendLittleEndian(FloatToBf16(value), &bytes);
    } else {
      AppendLittleEndian(value, &bytes);
    }
  }
  return bytes;
}

}  // namespace

void FillRandomRouting(int32_t num_experts, std::mt19937_64& random, v1::ForwardRequest* request) {
  const int32_t top_k = request->top_k();
  std::vector<int32_t> experts(static_cast<size_t>(num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::vector<float> weights(static_cast<size_t>(top_k));
  std::string& ids = *request->mutable_expert_ids();
  std::string& weight_bytes = *request->mutable_routing_weights();
  ids.clear();
  weight_bytes.clear();
  for (int32_t t = 0; t < request->num_tokens(); ++t) {
    float sum = 0;
    for (int32_t k = 0; k < top_k; ++k) {
      // A partial shuffle: the first min(K, E) picks of a token differ.
      const size_t place = static_cast<size_t>(k % num_experts);
      std::swap(experts[place], experts[place + random() % (experts.size() - place)]);
      AppendLittleEndian(experts[place], &ids);
      weights[static_cast<size_t>(k)] = 0.05f + UniformFloat(random);
      sum += weights[static_cast<size_t>(k)];
    }
    for (const float weight : weights) AppendLittleEndian(weight / sum, &weight_bytes);
  }
}

v1::ForwardRequest MakeRandomRequest(const v1::LayerInfo& layer,
                                     const RandomRequestOptions& options) {
  std::mt19937_64 random(options.seed);
  const v1::DType dtype =
      options.dtype == DType::kBf16 ? v1::DType::DTYPE_BF16 : v1::DType::DTYPE_F32;
  v1::ForwardRequest request;
  request.set_layer(layer.layer());
  request.set_num_tokens(options.tokens);
  request.set_hidden_size(layer.hidden_size());
  request.set_top_k(options.top_k > 0 ? options.top_k : layer.top_k());
  request.set_hidden_dtype(dtype);
  request.set_output_dtype(dtype);
  request.set_hidden_states(
      RandomHidden(int64_t{options.tokens} * layer.hidden_size(), options.dtype, random));
  FillRandomRouting(layer.num_experts(), random, &request);
  return request;
}

}  // namespace expertd
