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

PackedOnDevice::PackedOnDevice(const HostLayer& layer)
    : PackedOnDevice(layer, CountUp(layer.spec.num_experts)) {}

PackedOnDevice::PackedOnDevice(const HostLayer& layer, absl::Span<const int32_t> expert_of_slot)
    : spec_(layer.spec),
      num_slots_(static_cast<int32_t>(expert_of_slot.size())),
      block_(cuda::PackedLayerBytes(layer.spec, num_slots_)),
      view_(cuda::SetPackedLayer(layer.spec, num_slots_, block_.data())) {
  DeviceArray<uint8_t> codes(ShapeOf(spec_, Matrix::kGate).CodeBytes());
  DeviceArray<uint8_t> scales(ShapeOf(spec_, Matrix::kGate).ScaleBytes(spec_.recipe));
  const DeviceArray<uint8_t> scratch(cuda::PackScratchBytes(spec_));
  for (int32_t slot = 0; slot < num_slots_; ++slot) {
    const int32_t expert = expert_of_slot[slot];
    if (expert < 0) continue;
    // Up before gate in every second slot: the order must not matter.
    const int first = slot % 2;
    for (const int m : {first, 1 - first, 2}) {
      const auto matrix = static_cast<Matrix>(m);
      const reference::MatrixView view = layer.View(expert, matrix);
      codes.Upload(view.codes);
      scales.Upload(view.scales);
      const absl::Status status =
          cuda::LaunchPack(spec_, view_, slot, matrix, codes.data(), scales.data(),
                           static_cast<float>(view.second_level), scratch.data(), nullptr);
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

namespace {

template <typename T>
std::vector<T> DownloadArray(const T* array, size_t count) {
  std::vector<T> values(count);
  EXPECT_EQ(cudaMemcpy(values.data(), array, count * sizeof(T), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return values;
}

}  // namespace

std::vector<uint8_t> PackedOnDevice::Fc1Units() const {
  return DownloadArray(view_.fc1_units, num_slots_ * cuda::PackedFc1(spec_).slot_bytes());
}
std::vector<uint8_t> PackedOnDevice::Fc2Units() const {
  return DownloadArray(view_.fc2_units, num_slots_ * cuda::PackedFc2(spec_).slot_bytes());
}
std::vector<float> PackedOnDevice::Fc1Factors() const {
  return DownloadArray(view_.fc1_factors, num_slots_ * cuda::PackedFc1(spec_).scales_per_slot());
}
std::vector<float> PackedOnDevice::Fc2Factors() const {
  return DownloadArray(view_.fc2_factors, num_slots_ * cuda::PackedFc2(spec_).scales_per_slot());
}

DevicePlacement::DevicePlacement(int32_t num_experts)
    : first_slot_(CountUp(num_experts + 1)), slots_(CountUp(num_experts)) {}

DevicePlacement::DevicePlacement(const Placement& placement)
    : first_slot_(placement.num_experts() + 1),
      slots_(placement.num_ranks() * placement.slots_per_rank()) {
  std::vector<int32_t> first = {0};
  std::vector<int32_t> slots;
  for (int32_t expert = 0; expert < placement.num_experts(); ++expert) {
    const absl::Span<const int32_t> held = placement.SlotsOf(expert);
    slots.insert(slots.end(), held.begin(), held.end());
    first.push_back(static_cast<int32_t>(slots.size()));
  }
  first_slot_.Upload(first);
  slots_.Upload(slots);
}

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
  return AsFloats(output_.Download(), output_dtype_);
}

std::vector<float> AsFloats(const std::vector<uint8_t>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / DTypeBytes(dtype));
  if (dtype == DType::kF32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + 2 * i, 2);
    values[i] = Bf16ToFloat(bits);
  }
  return values;
}

}  // namespace expertd::testing
