#include "kernels/cuda/rank_device.h"

#include <utility>

#include "config/limits.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/pack_weights.h"
#include "kernels/step_memory_pool.h"

namespace expertd::cuda {

RankDevice::RankDevice(const CudaBackendOptions* options, int32_t rank, DeviceInfo device)
    : options_(options),
      rank_(rank),
      device_(std::move(device)),
      path_(options->path),
      memory_(std::make_unique<OnDevice>()) {}

absl::StatusOr<std::unique_ptr<RankDevice>> RankDevice::Start(const CudaBackendOptions* options,
                                                              int32_t rank,
                                                              const DeviceInfo& device,
                                                              std::function<void()> on_overdue) {
  std::unique_ptr<RankDevice> made(new RankDevice(options, rank, device));
  auto thread = DeviceThread::Start(device.device, std::move(on_overdue));
  if (!thread.ok()) return thread.status();
  made->thread_ = *std::move(thread);
  return made;
}

RankDevice::~RankDevice() {
  if (thread_ == nullptr) return;
  const absl::Status freed = thread_->Run([this](cudaStream_t) {
    memory_.reset();
    return absl::OkStatus();
  });
  // The GPU may still write into it: it goes when the process does.
  if (!freed.ok()) (void)memory_.release();
}

StepRunner::Options RankDevice::RunnerOptions() const {
  const BackendOptions& common = options_->common;
  StepRunner::Options options;
  options.layers = common.layers;
  options.placement = common.placement;
  options.rank = rank_;
  options.max_tokens = common.max_tokens_per_rank;
  options.path = path_;
  options.num_sms = device_.num_sms;
  options.step_timeout = common.step_timeout;
  options.partials_bf16 = common.partials == DType::kBf16;
  options.stall = options_->stall;
  if (path_ == KernelPath::kHostExchange) {
    options.communicator = memory_->communicator.get();
  } else if (memory_->communicator != nullptr) {
    options.peers = memory_->communicator->peers();
  }
  return options;
}

// Before anything is allocated, and again when the weights are there and the ranks are connected.
absl::Status RankDevice::CheckFits() const {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
  const StepRunner::Options runner = RunnerOptions();
  const MemoryQuestion question = StepRunner::QuestionOf(runner);
  const int64_t held = memory_->communicator == nullptr ? 0 : PlanMemory(question).nccl;
  return CheckMemory(question, static_cast<int64_t>(free_bytes) + weight_bytes() + held);
}

absl::Status RankDevice::AllocateWeights() {
  const BackendOptions& common = options_->common;
  if (absl::Status status = CheckFits(); !status.ok()) return status;
  const int32_t num_slots = common.placement->slots_per_rank();
  for (const LayerSpec& spec : common.layers) {
    auto block = MemoryBlock::Allocate(MemoryKind::kDevice, PackedLayerBytes(spec, num_slots));
    if (!block.ok()) return block.status();
    layers_.push_back({spec, SetPackedLayer(spec, num_slots, block->data())});
    memory_->weights.push_back(*std::move(block));
  }
  return absl::OkStatus();
}

absl::Status RankDevice::Connect(const ncclUniqueId& id) {
  CommunicatorOptions options;
  options.id = id;
  options.rank = rank_;
  options.num_ranks = options_->common.placement->num_ranks();
  options.limit = absl::Milliseconds(limits::kCudaFormMs);
  auto communicator = Communicator::Create(options);
  if (!communicator.ok()) return communicator.status();
  memory_->communicator = *std::move(communicator);
  return absl::OkStatus();
}

absl::Status RankDevice::OpenWindow(cudaStream_t stream) {
  const int64_t bytes = PlanMemory(StepRunner::QuestionOf(RunnerOptions())).workspace;
  const absl::Status opened = memory_->communicator->OpenWindow(bytes);
  if (!opened.ok()) return opened;
  return memory_->communicator->SelfTest(stream);
}

absl::Status RankDevice::UseHostExchange() {
  path_ = KernelPath::kHostExchange;
  return CheckFits();
}

absl::Status RankDevice::AllocateSteps() {
  const BackendOptions& common = options_->common;
  auto runner = StepRunner::Create(RunnerOptions());
  if (!runner.ok()) return runner.status();
  memory_->runner = *std::move(runner);
  const StepMemoryPool::Shape shape = {common.max_tokens_per_rank, common.layers[0].hidden_size};
  for (int i = 0; i < limits::kStepMemories; ++i) {
    auto block = MemoryBlock::Allocate(MemoryKind::kPinned,
                                       static_cast<size_t>(StepMemoryPool::RankBytes(shape)));
    if (!block.ok()) return block.status();
    memory_->step_memories.push_back(*std::move(block));
  }
  return absl::OkStatus();
}

std::vector<uint8_t*> RankDevice::step_memories() const {
  std::vector<uint8_t*> parts;
  for (const MemoryBlock& block : memory_->step_memories) parts.push_back(block.as<uint8_t>());
  return parts;
}

int64_t RankDevice::weight_bytes() const {
  int64_t bytes = 0;
  for (const MemoryBlock& block : memory_->weights) bytes += static_cast<int64_t>(block.bytes());
  return bytes;
}

int64_t RankDevice::workspace_bytes() const {
  int64_t bytes = memory_->runner->device_bytes() + memory_->runner->pinned_bytes();
  for (const MemoryBlock& block : memory_->step_memories) {
    bytes += static_cast<int64_t>(block.bytes());
  }
  return bytes;
}

}  // namespace expertd::cuda
