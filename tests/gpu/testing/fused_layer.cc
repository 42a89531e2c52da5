#include "tests/gpu/testing/fused_layer.h"

#include <cstring>

#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/launch.h"

namespace expertd::testing {
namespace {

struct Control {
  uint32_t stop;
  cuda::moe_layer::FaultRecord fault;
};

constexpr uint64_t kTimeoutNs = 5'000'000'000;

layout::WorkspaceShape ShapeOf(const LayerSpec& spec, int32_t max_tokens, int32_t max_top_k) {
  return {.num_ranks = 1,
          .max_tokens_per_rank = max_tokens,
          .max_top_k = max_top_k,
          .num_slots = spec.num_experts,
          .hidden = static_cast<int>(spec.hidden_size),
          .intermediate = static_cast<int>(spec.intermediate_size)};
}

}  // namespace

FusedLayer::FusedLayer(const HostLayer& layer, int32_t max_tokens, int32_t max_top_k)
    : spec_(layer.spec),
      shape_(ShapeOf(layer.spec, max_tokens, max_top_k)),
      packed_(layer),
      placement_(layer.spec.num_experts),
      workspace_(static_cast<size_t>(layout::PlanWorkspace(shape_).bytes), 0),
      plain_workspace_(
          cuda::UnfusedWorkspaceBytes(layer.spec, layer.spec.num_experts, max_tokens, max_top_k)) {
  ClearWorkspace();
  EXPECT_EQ(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(cuda::moe_layer::PrepareDevice(), cudaSuccess);
  auto control = cuda::MemoryBlock::Allocate(cuda::MemoryKind::kPinned, sizeof(Control));
  if (!control.ok()) {
    ADD_FAILURE() << control.status();
    return;
  }
  control_ = *std::move(control);
  std::memset(control_.data(), 0, sizeof(Control));
}

// Counters and flags are zero, data is NaN.
void FusedLayer::ClearWorkspace() {
  const layout::WorkspaceOffsets offsets = layout::PlanWorkspace(shape_);
  workspace_.Poison(0);
  EXPECT_EQ(cudaMemset(workspace_.data() + offsets.h, 0xff,
                       static_cast<size_t>(offsets.bytes - offsets.h)),
            cudaSuccess);
  step_ = 0;
}

void FusedLayer::Launch(const DeviceBatch& batch, DType output) {
  ASSERT_NE(control_.data(), nullptr);
  const cuda::UnfusedStep step = batch.step();
  cuda::moe_layer::MoeLayerParams params;
  params.num_tokens = step.num_tokens;
  params.top_k = step.top_k;
  params.hidden = static_cast<int32_t>(spec_.hidden_size);
  params.intermediate = static_cast<int32_t>(spec_.intermediate_size);
  params.num_experts = params.num_slots = params.slots_per_rank = spec_.num_experts;
  params.x = step.hidden;
  params.ids = step.ids;
  params.weights = step.weights;
  params.row_in_request = step.row_in_request;
  params.output = step.output;
  params.output_f32 = output == DType::kF32;
  params.step = ++step_;
  params.first_slot = placement_.view().first_slot;
  params.slots = placement_.view().slots;
  params.fc1_units = packed_.view().fc1_units;
  params.fc2_units = packed_.view().fc2_units;
  params.fc1_factors = packed_.view().fc1_factors;
  params.fc2_factors = packed_.view().fc2_factors;
  params.swiglu_limit = spec_.swiglu_limit;
  params.peers.base = reinterpret_cast<char*>(workspace_.data());
  params.workspace = layout::PlanWorkspace(shape_);
  auto* control = static_cast<Control*>(control_.device_data());
  params.stop = &control->stop;
  params.fault = &control->fault;
  params.timeout_ns = kTimeoutNs;
  const cuda::LayerShape shape = {.format = cuda::FormatOf(spec_.recipe),
                                  .hidden = spec_.hidden_size,
                                  .intermediate = spec_.intermediate_size,
                                  .num_experts = spec_.num_experts,
                                  .num_slots = spec_.num_experts};
  const auto config = cuda::ChooseKernelConfig(shape, step.num_tokens, step.top_k, num_sms_);
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_EQ(cuda::moe_layer::Launch(shape.format, *config, params, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

std::vector<uint8_t> FusedLayer::RunFused(const HostBatch& batch, DType output) {
  const DeviceBatch device_batch(batch, spec_.hidden_size, output);
  Launch(device_batch, output);
  const cuda::moe_layer::FaultRecord& fault = control_.as<Control>()->fault;
  EXPECT_EQ(fault.code, cuda::moe_layer::kNoFault)
      << "CTA " << fault.cta << ", tile " << fault.tile << ", found " << fault.found
      << ", expected " << fault.expected << ", T = " << batch.num_tokens;
  return device_batch.OutputBytes();
}

cuda::moe_layer::FaultRecord FusedLayer::RunStopped(const HostBatch& batch) {
  const DeviceBatch device_batch(batch, spec_.hidden_size, DType::kBf16);
  auto* control = control_.as<Control>();
  control->stop = 1;
  Launch(device_batch, DType::kBf16);
  const cuda::moe_layer::FaultRecord fault = control->fault;
  std::memset(control, 0, sizeof(Control));
  ClearWorkspace();
  return fault;
}

std::vector<float> FusedLayer::RunFusedF32(const HostBatch& batch) {
  return AsFloats(RunFused(batch, DType::kF32), DType::kF32);
}

std::vector<float> FusedLayer::RunPlain(const HostBatch& batch) {
  const DeviceBatch device_batch(batch, spec_.hidden_size, DType::kF32);
  const absl::Status status =
      cuda::LaunchUnfusedMoe(spec_, spec_.num_experts, packed_.view(), placement_.view(),
                             device_batch.step(), plain_workspace_.data(), nullptr);
  EXPECT_TRUE(status.ok()) << status;
  return device_batch.Output();
}

}  // namespace expertd::testing
