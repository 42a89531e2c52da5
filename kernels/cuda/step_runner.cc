#include "kernels/cuda/step_runner.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/moe_layer/launch.h"
#include "kernels/cuda/step_kernels.h"
#include "kernels/cuda/unfused_moe.h"
#include "kernels/layout/workspace.h"

namespace expertd::cuda {
namespace {

const char* WhatWasWaitedFor(uint32_t code) {
  switch (code) {
    case moe_layer::kWaitFc1:
      return "an FC2 tile waited for the intermediate of its tokens";
    case moe_layer::kWaitFc2:
      return "combine waited for the expert outputs of a token";
    case moe_layer::kWaitPipeline:
      return "a wait inside a CTA did not end";
    case moe_layer::kStopped:
      return "it was told to stop";
    default:
      return "unknown reason";
  }
}

MemoryQuestion QuestionOf(const StepRunner::Options& options) {
  return {options.layers, options.placement->slots_per_rank(), options.max_tokens, options.path};
}

}  // namespace

LayerShape KernelShapeOf(const LayerSpec& spec, int32_t num_slots) {
  return {.format = FormatOf(spec.recipe),
          .hidden = spec.hidden_size,
          .intermediate = spec.intermediate_size,
          .num_experts = spec.num_experts,
          .num_slots = num_slots,
          .num_ranks = 1};
}

absl::StatusOr<std::unique_ptr<StepRunner>> StepRunner::Create(const Options& options) {
  std::unique_ptr<StepRunner> runner(new StepRunner(options));
  if (absl::Status status = runner->Allocate(); !status.ok()) return status;
  if (absl::Status status = runner->UploadPlacement(); !status.ok()) return status;
  for (InFlight& slot : runner->in_flight_) {
    for (Event& mark : slot.marks) {
      absl::StatusOr<Event> made = Event::Make();
      if (!made.ok()) return made.status();
      mark = *std::move(made);
    }
  }
  if (options.path == KernelPath::kFused) {
    EXPERTD_CUDA_RETURN_IF_ERROR(moe_layer::PrepareDevice());
  }
  runner->description_ = options.path == KernelPath::kFused ? "fused kernel" : "plain kernels";
  return runner;
}

absl::Status StepRunner::Allocate() {
  layout_ = PlanStep(options_.layers, options_.max_tokens);
  const MemoryPlan plan = PlanMemory(QuestionOf(options_));
  const auto allocate = [&](MemoryKind kind, int64_t bytes, MemoryBlock* block) -> absl::Status {
    absl::StatusOr<MemoryBlock> made = MemoryBlock::Allocate(kind, static_cast<size_t>(bytes));
    if (!made.ok()) return made.status();
    *block = *std::move(made);
    if (kind == MemoryKind::kDevice) device_bytes_ += bytes;
    return absl::OkStatus();
  };
  if (absl::Status s = allocate(MemoryKind::kDevice, layout_.bytes, &step_memory_); !s.ok())
    return s;
  if (absl::Status s = allocate(MemoryKind::kDevice, plan.workspace, &workspace_); !s.ok())
    return s;
  if (absl::Status s = allocate(MemoryKind::kPinned, sizeof(Control), &control_); !s.ok()) return s;
  std::memset(control_.data(), 0, sizeof(Control));
  return absl::OkStatus();
}

absl::Status StepRunner::UploadPlacement() {
  const Placement& placement = *options_.placement;
  std::vector<int32_t> first_slot = {0};
  std::vector<int32_t> slots;
  for (int32_t expert = 0; expert < placement.num_experts(); ++expert) {
    const absl::Span<const int32_t> held = placement.SlotsOf(expert);
    slots.insert(slots.end(), held.begin(), held.end());
    first_slot.push_back(static_cast<int32_t>(slots.size()));
  }
  const size_t first_bytes = first_slot.size() * sizeof(int32_t);
  const size_t slot_bytes = slots.size() * sizeof(int32_t);
  absl::StatusOr<MemoryBlock> block =
      MemoryBlock::Allocate(MemoryKind::kDevice, first_bytes + slot_bytes);
  if (!block.ok()) return block.status();
  placement_tables_ = *std::move(block);
  device_bytes_ += static_cast<int64_t>(placement_tables_.bytes());
  auto* base = placement_tables_.as<int32_t>();
  first_slot_ = base;
  slots_ = base + first_slot.size();
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(base, first_slot.data(), first_bytes, cudaMemcpyHostToDevice));
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(base + first_slot.size(), slots.data(), slot_bytes, cudaMemcpyHostToDevice));
  return absl::OkStatus();
}

absl::Status StepRunner::Enqueue(const MoeStep& step, const DeviceLayer& layer, int index,
                                 cudaStream_t stream) {
  InFlight& slot = in_flight_[index];
  const RankBatch& batch = step.ranks[0];
  slot.empty = batch.num_tokens == 0;
  if (slot.empty) return absl::OkStatus();
  if (needs_reset_ || kernel_step_ == std::numeric_limits<uint32_t>::max()) {
    if (absl::Status status = ResetWorkspace(stream); !status.ok()) return status;
  }
  ++kernel_step_;
  slot.resets = resets_;
  control()->faults[index] = {};
  const int64_t hidden_size = layer.spec.hidden_size;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.marks[0].get(), stream));
  if (absl::Status status = CopyIn(step, hidden_size, stream); !status.ok()) return status;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.marks[1].get(), stream));
  if (absl::Status status = Compute(step, layer, index, stream); !status.ok()) return status;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.marks[2].get(), stream));
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(batch.output, step_array<void>(layout_.output),
                      batch.num_tokens * hidden_size * DTypeBytes(step.output_dtype),
                      cudaMemcpyDeviceToHost, stream));
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.marks[3].get(), stream));
  return absl::OkStatus();
}

// In stream order, so a step that still runs is not disturbed; a stop that was asked for is over.
absl::Status StepRunner::ResetWorkspace(cudaStream_t stream) {
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(workspace_.data(), 0, workspace_.bytes(), stream));
  if (std::atomic_ref(control()->stop_for_good).load() == 0) {
    std::atomic_ref(control()->stop).store(0);
  }
  kernel_step_ = 0;
  ++resets_;
  needs_reset_ = false;
  return absl::OkStatus();
}

absl::Status StepRunner::CopyIn(const MoeStep& step, int64_t hidden_size, cudaStream_t stream) {
  const RankBatch& batch = step.ranks[0];
  const int64_t elements = batch.num_tokens * hidden_size;
  const int64_t routes = int64_t{batch.num_tokens} * step.top_k;
  const bool f32 = step.input_dtype == DType::kF32;
  const auto copy = [&](int64_t offset, const void* from, int64_t bytes) {
    return cudaMemcpyAsync(step_array<void>(offset), from, bytes, cudaMemcpyHostToDevice, stream);
  };
  EXPERTD_CUDA_RETURN_IF_ERROR(copy(f32 ? layout_.hidden_f32 : layout_.hidden, batch.hidden,
                                    elements * DTypeBytes(step.input_dtype)));
  EXPERTD_CUDA_RETURN_IF_ERROR(copy(layout_.ids, batch.ids, routes * 4));
  EXPERTD_CUDA_RETURN_IF_ERROR(copy(layout_.weights, batch.weights, routes * 4));
  EXPERTD_CUDA_RETURN_IF_ERROR(
      copy(layout_.rows, batch.row_in_request, int64_t{batch.num_tokens} * 4));
  if (!f32) return absl::OkStatus();
  return LaunchRoundToBf16(step_array<float>(layout_.hidden_f32),
                           step_array<uint16_t>(layout_.hidden), elements, stream);
}

absl::Status StepRunner::Compute(const MoeStep& step, const DeviceLayer& layer, int index,
                                 cudaStream_t stream) {
  return options_.path == KernelPath::kFused ? LaunchFused(step, layer, index, stream)
                                             : LaunchPlain(step, layer, stream);
}

absl::Status StepRunner::LaunchPlain(const MoeStep& step, const DeviceLayer& layer,
                                     cudaStream_t stream) {
  const UnfusedStep unfused = {
      .num_tokens = step.ranks[0].num_tokens,
      .top_k = step.top_k,
      .hidden = step_array<uint16_t>(layout_.hidden),
      .ids = step_array<int32_t>(layout_.ids),
      .weights = step_array<float>(layout_.weights),
      .row_in_request = step_array<int32_t>(layout_.rows),
      .output = step_array<void>(layout_.output),
      .output_dtype = step.output_dtype,
  };
  return LaunchUnfusedMoe(layer.spec, options_.placement->slots_per_rank(), layer.packed,
                          {first_slot_, slots_}, unfused, workspace_.data(), stream);
}

absl::Status StepRunner::LaunchFused(const MoeStep& step, const DeviceLayer& layer, int index,
                                     cudaStream_t stream) {
  const int32_t num_slots = options_.placement->slots_per_rank();
  const int32_t num_tokens = step.ranks[0].num_tokens;
  const auto control_address = static_cast<char*>(control_.device_data());
  moe_layer::MoeLayerParams params;
  params.num_tokens = num_tokens;
  params.top_k = step.top_k;
  params.hidden = static_cast<int32_t>(layer.spec.hidden_size);
  params.intermediate = static_cast<int32_t>(layer.spec.intermediate_size);
  params.num_experts = layer.spec.num_experts;
  params.num_slots = num_slots;
  params.slots_per_rank = num_slots;
  params.x = step_array<uint16_t>(layout_.hidden);
  params.ids = step_array<int32_t>(layout_.ids);
  params.weights = step_array<float>(layout_.weights);
  params.row_in_request = step_array<int32_t>(layout_.rows);
  params.output = step_array<void>(layout_.output);
  params.output_f32 = step.output_dtype == DType::kF32;
  params.step = kernel_step_;
  params.first_slot = first_slot_;
  params.slots = slots_;
  params.fc1_units = layer.packed.fc1_units;
  params.fc2_units = layer.packed.fc2_units;
  params.fc1_factors = layer.packed.fc1_factors;
  params.fc2_factors = layer.packed.fc2_factors;
  params.swiglu_limit = layer.spec.swiglu_limit;
  params.peers.base = workspace_.as<char>();
  params.workspace = layout::PlanWorkspace(ShapeOfWorkspace(layer.spec, QuestionOf(options_)));
  params.stop = reinterpret_cast<const uint32_t*>(control_address + offsetof(Control, stop));
  params.fault =
      reinterpret_cast<moe_layer::FaultRecord*>(control_address + offsetof(Control, faults)) +
      index;
  params.timeout_ns = static_cast<uint64_t>(limits::kCudaWaitMs) * 1'000'000;
  const absl::StatusOr<KernelConfig> config = ChooseKernelConfig(
      KernelShapeOf(layer.spec, num_slots), num_tokens, step.top_k, options_.num_sms);
  if (!config.ok()) return config.status();
  return EXPERTD_CUDA_STATUS(
      moe_layer::Launch(FormatOf(layer.spec.recipe), *config, params, stream));
}

absl::Status StepRunner::FaultStatus(const moe_layer::FaultRecord& fault) const {
  return absl::DeadlineExceededError(
      absl::StrCat("the GPU gave the step up: ", WhatWasWaitedFor(fault.code), " (kernel step ",
                   fault.step, ", CTA ", fault.cta, ", tile ", fault.tile, ", found ", fault.found,
                   ", expected ", fault.expected, ", waited ", fault.waited_us, " us)"));
}

absl::Status StepRunner::Collect(int index, StepTiming* timing) {
  InFlight& slot = in_flight_[index];
  if (slot.empty) return absl::OkStatus();
  const moe_layer::FaultRecord& fault = control()->faults[index];
  if (fault.code != moe_layer::kNoFault) {
    needs_reset_ = true;
    return FaultStatus(fault);
  }
  if (needs_reset_ && slot.resets == resets_) {
    return absl::UnavailableError("the step ran behind one that the GPU gave up");
  }
  int64_t* const parts[] = {&timing->copy_in_us, &timing->kernel_us, &timing->copy_out_us};
  for (int i = 0; i < 3; ++i) {
    float ms = 0;
    EXPERTD_CUDA_RETURN_IF_ERROR(
        cudaEventElapsedTime(&ms, slot.marks[i].get(), slot.marks[i + 1].get()));
    *parts[i] = static_cast<int64_t>(ms * 1000);
  }
  return absl::OkStatus();
}

void StepRunner::Stop(bool for_good) {
  if (for_good) std::atomic_ref(control()->stop_for_good).store(1);
  std::atomic_ref(control()->stop).store(1);
}

}  // namespace expertd::cuda
