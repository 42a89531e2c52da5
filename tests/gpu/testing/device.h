#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "config/cluster_spec.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/pack_weights.h"
#include "kernels/cuda/unfused_moe.h"
#include "tests/gpu/testing/moe_cases.h"

namespace expertd::testing {

// Every test that needs a GPU: skipped, visibly, where there is none.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override;
};

// A vector's copy on the device.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count, int poison = 0xff) { Allocate(count, poison); }
  explicit DeviceArray(const std::vector<T>& values) {
    Allocate(values.size(), 0xff);
    Upload(values);
  }

  T* data() const { return static_cast<T*>(block_.data()); }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }

  // To the array's begin; what lies behind stays.
  void Upload(absl::Span<const T> values) {
    ASSERT_LE(values.size(), count_);
    Check(cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void Poison(int byte) { Check(cudaMemset(block_.data(), byte, block_.bytes())); }
  std::vector<T> Download() const {
    std::vector<T> values(count_);
    Check(cudaMemcpy(values.data(), data(), bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  static void Check(cudaError_t error) {
    if (error != cudaSuccess) ADD_FAILURE() << cudaGetErrorString(error);
  }
  // Never empty, so that data() is a valid address.
  void Allocate(size_t count, int poison) {
    count_ = count;
    auto block = cuda::MemoryBlock::Allocate(cuda::MemoryKind::kDevice, count * sizeof(T) + 16);
    ASSERT_TRUE(block.ok()) << block.status();
    block_ = *std::move(block);
    Poison(poison);
  }

  cuda::MemoryBlock block_;
  size_t count_ = 0;
};

// Output bytes as numbers.
std::vector<float> AsFloats(const std::vector<uint8_t>& bytes, DType dtype);

// A layer's canonical matrices on the device.
class DeviceLayer {
 public:
  explicit DeviceLayer(const HostLayer& layer);
  const cuda::CanonicalLayer& view() const { return view_; }

 private:
  std::vector<DeviceArray<uint8_t>> bytes_;
  DeviceArray<float> second_level_;
  cuda::CanonicalLayer view_;
};

// A layer's matrices packed on the current GPU; the memory is poisoned first.
class PackedOnDevice {
 public:
  explicit PackedOnDevice(const HostLayer& layer);  // slot = expert
  // An empty slot (-1) stays as it is.
  PackedOnDevice(const HostLayer& layer, absl::Span<const int32_t> expert_of_slot);
  const cuda::PackedLayer& view() const { return view_; }

  std::vector<uint8_t> Fc1Units() const;
  std::vector<uint8_t> Fc2Units() const;
  std::vector<float> Fc1Factors() const;
  std::vector<float> Fc2Factors() const;

 private:
  LayerSpec spec_;
  int32_t num_slots_;
  DeviceArray<uint8_t> block_;
  cuda::PackedLayer view_;
};

// Placement tables on the current device.
class DevicePlacement {
 public:
  explicit DevicePlacement(int32_t num_experts);  // one rank that holds every expert: slot = expert
  explicit DevicePlacement(const Placement& placement);
  cuda::PlacementTable view() const { return {first_slot_.data(), slots_.data()}; }

 private:
  DeviceArray<int32_t> first_slot_;
  DeviceArray<int32_t> slots_;
};

// A batch's arrays on the device, with an output that starts as NaN.
class DeviceBatch {
 public:
  DeviceBatch(const HostBatch& batch, int64_t hidden_size, DType output_dtype);
  cuda::UnfusedStep step() const;
  std::vector<float> Output() const;
  std::vector<uint8_t> OutputBytes() const { return output_.Download(); }
  void PoisonOutput() { output_.Poison(0xff); }

 private:
  int32_t num_tokens_;
  int32_t top_k_;
  DType output_dtype_;
  DeviceArray<uint16_t> hidden_;
  DeviceArray<int32_t> ids_;
  DeviceArray<float> weights_;
  DeviceArray<int32_t> row_in_request_;
  DeviceArray<uint8_t> output_;
};

}  // namespace expertd::testing
