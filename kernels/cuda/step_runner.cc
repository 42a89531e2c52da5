#include "kernels/cuda/step_runner.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "kernels/cuda/check.h"
#include "kernels/cuda/moe_layer/launch.h"
#include "kernels/cuda/step_kernels.h"
#include "kernels/cuda/step_limits.h"
#include "kernels/layout/workspace.h"

namespace expertd::cuda {

LayerShape KernelShapeOf(const LayerSpec& spec, int32_t num_slots, int32_t num_ranks) {
  return {.format = FormatOf(spec.recipe),
          .hidden = spec.hidden_size,
          .intermediate = spec.intermediate_size,
          .num_experts = spec.num_experts,
          .num_slots = num_slots,
          .num_ranks = num_ranks};
}

MemoryQuestion StepRunner::QuestionOf(const Options& options) {
  return {.layers = options.layers,
          .num_slots = options.placement->slots_per_rank(),
          .max_tokens_per_rank = options.max_tokens,
          .path = options.path,
          .num_ranks = options.placement->num_ranks(),
          .partials_bf16 = options.partials_bf16};
}

int32_t StepRunner::NumParts(int32_t max_tokens, int32_t top_k) const {
  const int32_t rows = PartTokens(question_, top_k);
  return std::max(1, (max_tokens + rows - 1) / rows);
}

StepRunner::StepRunner(const Options& options)
    : options_(options),
      question_(QuestionOf(options_)),
      num_ranks_(options.placement->num_ranks()) {}

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
  if (absl::Status status = PrepareStepKernels(); !status.ok()) return status;
  if (options.path != KernelPath::kUnfused) {
    EXPERTD_CUDA_RETURN_IF_ERROR(moe_layer::PrepareDevice());
  }
  if (options.path == KernelPath::kHostExchange) {
    if (absl::Status status = runner->MakeExchange(); !status.ok()) return status;
  }
  return runner;
}

absl::Status StepRunner::Allocate() {
  layout_ = PlanStep(options_.layers, options_.max_tokens);
  workspace_bytes_ = PlanMemory(question_).workspace;
  const auto allocate = [](MemoryKind kind, int64_t bytes, MemoryBlock* block) -> absl::Status {
    absl::StatusOr<MemoryBlock> made = MemoryBlock::Allocate(kind, static_cast<size_t>(bytes));
    if (!made.ok()) return made.status();
    *block = *std::move(made);
    return absl::OkStatus();
  };
  device_bytes_ = layout_.bytes + workspace_bytes_;  // also where others allocate it
  if (absl::Status s = allocate(MemoryKind::kDevice, layout_.bytes, &step_memory_); !s.ok())
    return s;
  peers_ = options_.peers;
  if (num_ranks_ == 1) {
    if (absl::Status s = allocate(MemoryKind::kDevice, workspace_bytes_, &workspace_); !s.ok())
      return s;
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemset(workspace_.data(), 0, workspace_.bytes()));
    peers_.base = workspace_.as<char>();
  }
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
  placement_ = {base, base + first_slot.size()};
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(base, first_slot.data(), first_bytes, cudaMemcpyHostToDevice));
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(base + first_slot.size(), slots.data(), slot_bytes, cudaMemcpyHostToDevice));
  return absl::OkStatus();
}

absl::Status StepRunner::MakeExchange() {
  {
    std::lock_guard lock(exchange_mutex_);
    exchange_.reset();
  }
  HostExchangeOptions exchange;
  exchange.shape = ShapeOfExchange(question_);
  exchange.placement = placement_;
  exchange.num_sms = options_.num_sms;
  exchange.limit = options_.step_timeout;
  exchange.group = options_.communicator;
  absl::StatusOr<std::unique_ptr<HostExchange>> made = HostExchange::Create(exchange);
  if (!made.ok()) return made.status();
  std::lock_guard lock(exchange_mutex_);
  exchange_ = *std::move(made);
  return absl::OkStatus();
}

absl::Status StepRunner::Enqueue(const StepOrder& order, const DeviceLayer& layer,
                                 cudaStream_t stream) {
  InFlight& slot = in_flight_[order.index];
  const MoeStep& step = *order.step;
  const int64_t rows = batch(step).num_tokens;
  control()->faults[order.index] = {};
  slot.empty = num_ranks_ == 1 && rows == 0;
  if (slot.empty) return absl::OkStatus();
  const int64_t hidden_size = layer.spec.hidden_size;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.marks[0].get(), stream));
  if (absl::Status status = CopyIn(step, hidden_size, stream); !status.ok()) return status;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.marks[1].get(), stream));
  if (absl::Status status = Compute(order, layer, stream); !status.ok()) return status;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.marks[2].get(), stream));
  if (rows > 0) {
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(
        batch(step).output, step_array<void>(layout_.output),
        rows * hidden_size * DTypeBytes(step.output_dtype), cudaMemcpyDeviceToHost, stream));
  }
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.marks[3].get(), stream));
  return exchange_ == nullptr ? absl::OkStatus() : exchange_->Finish();
}

absl::Status StepRunner::CopyIn(const MoeStep& step, int64_t hidden_size, cudaStream_t stream) {
  const RankBatch& rows = batch(step);
  if (rows.num_tokens == 0) return absl::OkStatus();
  const int64_t elements = rows.num_tokens * hidden_size;
  const int64_t routes = int64_t{rows.num_tokens} * step.top_k;
  const bool f32 = step.input_dtype == DType::kF32;
  const auto copy = [&](int64_t offset, const void* from, int64_t bytes) {
    return cudaMemcpyAsync(step_array<void>(offset), from, bytes, cudaMemcpyHostToDevice, stream);
  };
  EXPERTD_CUDA_RETURN_IF_ERROR(copy(f32 ? layout_.hidden_f32 : layout_.hidden, rows.hidden,
                                    elements * DTypeBytes(step.input_dtype)));
  EXPERTD_CUDA_RETURN_IF_ERROR(copy(layout_.ids, rows.ids, routes * 4));
  EXPERTD_CUDA_RETURN_IF_ERROR(copy(layout_.weights, rows.weights, routes * 4));
  EXPERTD_CUDA_RETURN_IF_ERROR(
      copy(layout_.rows, rows.row_in_request, int64_t{rows.num_tokens} * 4));
  if (!f32) return absl::OkStatus();
  return LaunchRoundToBf16(step_array<float>(layout_.hidden_f32),
                           step_array<uint16_t>(layout_.hidden), elements, stream);
}

absl::Status StepRunner::Compute(const StepOrder& order, const DeviceLayer& layer,
                                 cudaStream_t stream) {
  const MoeStep& step = *order.step;
  const int32_t rows = PartTokens(question_, step.top_k);
  const int32_t parts = NumParts(order.max_tokens, step.top_k);
  for (int32_t i = 0; i < parts; ++i) {
    const int64_t first = int64_t{i} * rows;
    const auto rows_of = [&](int32_t tokens) {
      return static_cast<int32_t>(std::clamp<int64_t>(tokens - first, 0, rows));
    };
    const Part part = {first, rows_of(batch(step).num_tokens), rows_of(order.max_tokens),
                       order.kernel_step + static_cast<uint32_t>(i)};
    absl::Status status;
    if (options_.path == KernelPath::kFused) {
      status = LaunchFused(order, part, layer, stream);
    } else if (options_.path == KernelPath::kUnfused) {
      status =
          LaunchUnfusedMoe(layer.spec, question_.num_slots, layer.packed, placement_,
                           ViewOf(step, part, layer.spec.hidden_size), workspace_.data(), stream);
    } else {
      if (options_.stall) exchange_->SetStall(options_.stall(options_.rank));
      status =
          exchange_->Enqueue(layer.spec, layer.packed, ViewOf(step, part, layer.spec.hidden_size),
                             part.kernel_step, stream);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

UnfusedStep StepRunner::ViewOf(const MoeStep& step, const Part& part, int64_t hidden_size) const {
  const int64_t element = part.first * hidden_size;
  const int64_t route = part.first * step.top_k;
  return {.num_tokens = part.tokens,
          .top_k = step.top_k,
          .hidden = step_array<uint16_t>(layout_.hidden) + element,
          .ids = step_array<int32_t>(layout_.ids) + route,
          .weights = step_array<float>(layout_.weights) + route,
          .row_in_request = step_array<int32_t>(layout_.rows) + part.first,
          .output = step_array<char>(layout_.output) + element * DTypeBytes(step.output_dtype),
          .output_dtype = step.output_dtype};
}

absl::Status StepRunner::LaunchFused(const StepOrder& order, const Part& part,
                                     const DeviceLayer& layer, cudaStream_t stream) {
  const LayerSpec& spec = layer.spec;
  const UnfusedStep view = ViewOf(*order.step, part, spec.hidden_size);
  const auto control_address = static_cast<char*>(control_.device_data());
  moe_layer::MoeLayerParams params;
  params.num_tokens = view.num_tokens;
  params.top_k = view.top_k;
  params.hidden = static_cast<int32_t>(spec.hidden_size);
  params.intermediate = static_cast<int32_t>(spec.intermediate_size);
  params.num_experts = spec.num_experts;
  params.num_slots = question_.num_slots;
  params.slots_per_rank = question_.num_slots;
  params.x = view.hidden;
  params.ids = view.ids;
  params.weights = view.weights;
  params.row_in_request = view.row_in_request;
  params.output = view.output;
  params.output_f32 = view.output_dtype == DType::kF32;
  params.step = part.kernel_step;
  params.first_slot = placement_.first_slot;
  params.slots = placement_.slots;
  params.fc1_units = layer.packed.fc1_units;
  params.fc2_units = layer.packed.fc2_units;
  params.fc1_factors = layer.packed.fc1_factors;
  params.fc2_factors = layer.packed.fc2_factors;
  params.swiglu_limit = spec.swiglu_limit;
  params.peers = peers_;
  params.partials_bf16 = options_.partials_bf16;
  params.workspace = layout::PlanWorkspace(ShapeOfWorkspace(spec, question_));
  params.stop = reinterpret_cast<const uint32_t*>(control_address + offsetof(Control, stop));
  params.fault =
      reinterpret_cast<moe_layer::FaultRecord*>(control_address + offsetof(Control, faults)) +
      order.index;
  const int64_t routes = int64_t{num_ranks_} * part.max_tokens * view.top_k;
  params.timeout_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(WaitLimit(
      {num_ranks_, routes, spec.hidden_size, spec.intermediate_size, options_.step_timeout})));
  if (options_.stall) params.stall = options_.stall(options_.rank);
  const absl::StatusOr<KernelConfig> config =
      ChooseKernelConfig(KernelShapeOf(spec, question_.num_slots, num_ranks_), part.max_tokens,
                         view.top_k, options_.num_sms);
  if (!config.ok()) return config.status();
  return EXPERTD_CUDA_STATUS(moe_layer::Launch(FormatOf(spec.recipe), *config, params, stream));
}

RankResult StepRunner::Collect(const StepOrder& order, StepTiming* timing) {
  const InFlight& slot = in_flight_[order.index];
  RankResult result;
  result.rank = options_.rank;
  if (slot.empty) return result;
  result.fault = control()->faults[order.index];
  if (result.fault.code != moe_layer::kNoFault) return result;
  int64_t* const parts[] = {&timing->copy_in_us, &timing->kernel_us, &timing->copy_out_us};
  for (int i = 0; i < 3; ++i) {
    float ms = 0;
    result.status = EXPERTD_CUDA_STATUS(
        cudaEventElapsedTime(&ms, slot.marks[i].get(), slot.marks[i + 1].get()));
    if (!result.status.ok()) return result;
    *parts[i] = static_cast<int64_t>(ms * 1000);
  }
  return result;
}

void StepRunner::Stop(bool for_good) {
  if (for_good) std::atomic_ref(control()->stop_for_good).store(1);
  std::atomic_ref(control()->stop).store(1);
  std::lock_guard lock(exchange_mutex_);
  if (exchange_ != nullptr) exchange_->Stop();
}

absl::Status StepRunner::Reset(cudaStream_t stream) {
  if (options_.path == KernelPath::kHostExchange) return MakeExchange();
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(peers_.at<char>(peers_.rank, 0), 0, workspace_bytes_, stream));
  if (std::atomic_ref(control()->stop_for_good).load() == 0) {
    std::atomic_ref(control()->stop).store(0);
  }
  return absl::OkStatus();
}

}  // namespace expertd::cuda
