#pragma once

#include <cstdint>
#include <vector>

#include "config/dtype.h"
#include "kernels/cuda/moe_layer/params.h"
#include "tests/gpu/testing/device.h"
#include "tests/gpu/testing/moe_cases.h"

namespace expertd::testing {

// A layer on the device with what both paths need to run it: packed weights, placement, workspaces
// for batches of up to max_tokens x max_top_k. One rank, slot = expert.
class FusedLayer {
 public:
  // What the fused kernel has to write before it reads starts as NaN.
  FusedLayer(const HostLayer& layer, int32_t max_tokens, int32_t max_top_k);

  // The output as it lies in memory; the output buffer starts as NaN. A fault record fails the
  // test.
  std::vector<uint8_t> RunFused(const HostBatch& batch, DType output = DType::kBf16);
  std::vector<float> RunFusedF32(const HostBatch& batch);
  // A step whose stop word is set from the start: what it left on record. Afterwards the workspace
  // is as new.
  cuda::moe_layer::FaultRecord RunStopped(const HostBatch& batch);
  // The plain path in f32: the oracle.
  std::vector<float> RunPlain(const HostBatch& batch);

 private:
  void ClearWorkspace();
  void Launch(const DeviceBatch& batch, DType output);

  LayerSpec spec_;
  int num_sms_ = 0;
  layout::WorkspaceShape shape_;
  PackedOnDevice packed_;
  DevicePlacement placement_;
  DeviceArray<uint8_t> workspace_;
  DeviceArray<uint8_t> plain_workspace_;
  cuda::MemoryBlock control_;  // pinned: stop word, fault record
  uint32_t step_ = 0;
};

}  // namespace expertd::testing
