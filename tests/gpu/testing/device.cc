#include "tests/gpu/testing/device.h"

#include <cstring>
#include <numeric>

#include "kernels/formats.h"

namespace expertd::testing {

void GpuTest::SetUp() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    GTEST_SKIP() << "no GPU: "
                 << (error == cudaSuccess ? "no device is visible" : cudaGetErrorString(error));
  }
}

DeviceLayer::DeviceLayer(const HostLayer& layer) : second_level_(layer.second_level) {
  for (int m = 0; m < kNumMatrices; ++m) {
    bytes_.emplace_back(layer.codes[m]);
    view_.codes[m] = bytes_.back().data();
    bytes_.emplace_back(layer.scales[m]);
    view_.scales[m] = bytes_.back().data();
  }
  view_.second_level = second_level_.data();
}

namespace {

std::vector<int32_t> CountUp(int32_t count) {
  std::vector<int32_t> values(count);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

}  // namespace

DevicePlacement::DevicePlacement(int32_t num_experts)
    : first_slot_(CountUp(num_experts + 1)), slots_(CountUp(num_experts)) {}

DeviceBatch::DeviceBatch(const HostBatch& batch, int64_t hidden_size, DType output_dtype)
    : num_tokens_(batch.num_tokens),
      top_k_(batch.top_k),
      output_dtype_(output_dtype),
      hidden_(batch.hidden),
      ids_(batch.ids),
      weights_(batch.weights),
      row_in_request_(batch.row_in_request),
      output_(static_cast<size_t>(batch.num_tokens) * hidden_size * DTypeBytes(output_dtype)) {}

cuda::UnfusedStep DeviceBatch::step() const {
  return {.num_tokens = num_tokens_,
          .top_k = top_k_,
          .hidden = hidden_.data(),
          .ids = ids_.data(),
          .weights = weights_.data(),
          .row_in_request = row_in_request_.data(),
          .output = output_.data(),
          .output_dtype = output_dtype_};
}

std::vector<float> DeviceBatch::Output() const {
  const std::vector<uint8_t> bytes = output_.Download();
  std::vector<float> values(bytes.size() / DTypeBytes(output_dtype_));
  for (size_t i = 0; i < values.size(); ++i) {
    if (output_dtype_ == DType::kF32) {
      std::memcpy(&values[i], bytes.data() + 4 * i, 4);
    } else {
      uint16_t bits;
      std::memcpy(&bits, bytes.data() + 2 * i, 2);
      values[i] = Bf16ToFloat(bits);
    }
  }
  return values;
}

}  // namespace expertd::testing
