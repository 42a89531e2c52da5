#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/device_thread.h"
#include "kernels/cuda/pack_weights.h"
#include "kernels/cuda/step_runner.h"
#include "kernels/cuda/weight_sink.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

class CudaBackend final : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<Backend>> Create(const CudaBackendOptions& options,
                                                         int device,
                                                         const cudaDeviceProp& properties);
  ~CudaBackend() override;

  const BackendInfo& info() const override { return info_; }
  WeightSink& sink() override { return *sink_; }
  absl::StatusOr<StepMemory*> AcquireStep(absl::Time deadline) override;
  void ReleaseStep(StepMemory* memory) override;
  absl::Status Submit(const MoeStep& step, Done done) override;
  void AbortSteps(const absl::Status& reason) override;

 private:
  struct Memory {
    MemoryBlock block;
    StepMemory step;
    bool free = true;
  };
  // Everything that the device thread allocates and frees.
  struct OnDevice {
    std::vector<MemoryBlock> weights;  // by layer
    std::unique_ptr<StepRunner> runner;
    std::vector<Memory> memories;  // [kStepMemories]; `free` is guarded by mutex_
  };

  explicit CudaBackend(const CudaBackendOptions& options) : options_(options) {}
  absl::Status SetUp(int device, const cudaDeviceProp& properties);
  absl::Status Allocate(int num_sms);
  absl::Status AllocateStepMemory(Memory* memory, int64_t hidden_size);
  void FillInfo(int device, const cudaDeviceProp& properties);
  const DeviceLayer* FindLayer(int32_t layer) const;
  absl::Status Validate(const MoeStep& step) const;
  void Finished(int index, absl::Status status, const Done& done);

  const CudaBackendOptions options_;
  BackendInfo info_;
  std::vector<DeviceLayer> layers_;
  std::unique_ptr<OnDevice> memory_;
  std::unique_ptr<DeviceThread> thread_;
  std::unique_ptr<CudaWeightSink> sink_;

  std::mutex mutex_;
  std::condition_variable released_;  // AcquireStep waits for a free memory
  int32_t in_flight_ = 0;             // guarded by mutex_, as what follows
  uint64_t submitted_ = 0;
  absl::Status abort_reason_;
};

absl::StatusOr<std::unique_ptr<Backend>> CudaBackend::Create(const CudaBackendOptions& options,
                                                             int device,
                                                             const cudaDeviceProp& properties) {
  std::unique_ptr<CudaBackend> backend(new CudaBackend(options));
  if (absl::Status status = backend->SetUp(device, properties); !status.ok()) return status;
  return backend;
}

absl::Status CudaBackend::SetUp(int device, const cudaDeviceProp& properties) {
  memory_ = std::make_unique<OnDevice>();
  auto thread = DeviceThread::Start(device, [this] { memory_->runner->Stop(/*for_good=*/false); });
  if (!thread.ok()) return thread.status();
  thread_ = *std::move(thread);
  absl::Status status =
      thread_->Run([&](cudaStream_t) { return Allocate(properties.multiProcessorCount); });
  if (!status.ok()) return status;
  auto sink = CudaWeightSink::Create(&layers_, options_.common.placement, thread_.get());
  if (!sink.ok()) return sink.status();
  sink_ = *std::move(sink);
  FillInfo(device, properties);
  return absl::OkStatus();
}

// On the device thread.
absl::Status CudaBackend::Allocate(int num_sms) {
  const BackendOptions& common = options_.common;
  const int32_t num_slots = common.placement->slots_per_rank();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
  const MemoryQuestion question = {common.layers, num_slots, common.max_tokens_per_rank,
                                   options_.path};
  if (absl::Status status = CheckMemory(question, static_cast<int64_t>(free_bytes)); !status.ok()) {
    return status;
  }
  for (const LayerSpec& spec : common.layers) {
    auto block = MemoryBlock::Allocate(MemoryKind::kDevice, PackedLayerBytes(spec, num_slots));
    if (!block.ok()) return block.status();
    info_.weight_bytes += static_cast<int64_t>(block->bytes());
    layers_.push_back({spec, SetPackedLayer(spec, num_slots, block->data())});
    memory_->weights.push_back(*std::move(block));
  }
  auto runner = StepRunner::Create(
      {common.layers, common.placement, common.max_tokens_per_rank, options_.path, num_sms});
  if (!runner.ok()) return runner.status();
  memory_->runner = *std::move(runner);
  info_.workspace_bytes = memory_->runner->device_bytes() + memory_->runner->pinned_bytes();
  memory_->memories.resize(limits::kStepMemories);
  for (Memory& memory : memory_->memories) {
    if (absl::Status status = AllocateStepMemory(&memory, common.layers[0].hidden_size);
        !status.ok()) {
      return status;
    }
    info_.workspace_bytes += static_cast<int64_t>(memory.block.bytes());
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::AllocateStepMemory(Memory* memory, int64_t hidden_size) {
  const int64_t rows = options_.common.max_tokens_per_rank;
  const int64_t hidden_bytes = rows * hidden_size * 4;
  const int64_t route_bytes = rows * limits::kMaxTopK * 4;
  auto block = MemoryBlock::Allocate(
      MemoryKind::kPinned, static_cast<size_t>(2 * hidden_bytes + 2 * route_bytes + rows * 4));
  if (!block.ok()) return block.status();
  memory->block = *std::move(block);
  char* at = memory->block.as<char>();
  const auto take = [&at](int64_t bytes) { return std::exchange(at, at + bytes); };
  RankBatch& batch = memory->step.ranks.emplace_back();
  batch.hidden = take(hidden_bytes);
  batch.output = take(hidden_bytes);
  batch.ids = reinterpret_cast<int32_t*>(take(route_bytes));
  batch.weights = reinterpret_cast<float*>(take(route_bytes));
  batch.row_in_request = reinterpret_cast<int32_t*>(take(rows * 4));
  return absl::OkStatus();
}

void CudaBackend::FillInfo(int device, const cudaDeviceProp& properties) {
  info_.name = "cuda";
  info_.num_ranks = 1;
  info_.max_tokens_per_rank = options_.common.max_tokens_per_rank;
  info_.devices = {absl::StrCat("device ", device, ": ", properties.name, ", ",
                                properties.multiProcessorCount, " SMs, ",
                                properties.totalGlobalMem >> 20, " MiB")};
  info_.detail = absl::StrCat("sm_90a, ", memory_->runner->description());
}

// Steps that were submitted end first: the device thread does everything in order.
CudaBackend::~CudaBackend() {
  sink_.reset();
  if (thread_ == nullptr) return;
  const absl::Status freed = thread_->Run([this](cudaStream_t) {
    memory_.reset();
    return absl::OkStatus();
  });
  // The GPU may still write into it: it goes when the process does.
  if (!freed.ok()) (void)memory_.release();
}

absl::StatusOr<StepMemory*> CudaBackend::AcquireStep(absl::Time deadline) {
  std::unique_lock lock(mutex_);
  std::vector<Memory>& memories = memory_->memories;
  const auto find = [&] {
    return std::find_if(memories.begin(), memories.end(), [](const Memory& m) { return m.free; });
  };
  if (!released_.wait_until(lock, absl::ToChronoTime(deadline),
                            [&] { return find() != memories.end(); })) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", limits::kStepMemories, " step memories are in use"));
  }
  Memory& memory = *find();
  memory.free = false;
  memory.step.ranks[0].num_tokens = 0;
  return &memory.step;
}

void CudaBackend::ReleaseStep(StepMemory* step) {
  {
    std::lock_guard lock(mutex_);
    std::vector<Memory>& memories = memory_->memories;
    const auto memory = std::find_if(memories.begin(), memories.end(),
                                     [&](const Memory& m) { return &m.step == step; });
    EXPERTD_CHECK(memory != memories.end() && !memory->free);
    memory->free = true;
  }
  released_.notify_one();
}

const DeviceLayer* CudaBackend::FindLayer(int32_t layer) const {
  const auto found = std::find_if(layers_.begin(), layers_.end(),
                                  [layer](const DeviceLayer& l) { return l.spec.layer == layer; });
  return found == layers_.end() ? nullptr : &*found;
}

// Ids are looked at again here: a wrong one would send the kernel outside its tables.
absl::Status CudaBackend::Validate(const MoeStep& step) const {
  if (!sink_->finished()) return absl::FailedPreconditionError("the weights are not loaded");
  if (FindLayer(step.layer) == nullptr) {
    return absl::NotFoundError(absl::StrCat("layer ", step.layer, " is not served"));
  }
  if (step.top_k < 1 || step.top_k > limits::kMaxTopK) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", step.top_k, ", must be 1..", limits::kMaxTopK));
  }
  if (step.ranks.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step has ", step.ranks.size(), " ranks, the process 1"));
  }
  const RankBatch& batch = step.ranks[0];
  if (batch.num_tokens < 0 || batch.num_tokens > options_.common.max_tokens_per_rank) {
    return absl::InvalidArgumentError(absl::StrCat("got ", batch.num_tokens,
                                                   " tokens, the buffer is sized for ",
                                                   options_.common.max_tokens_per_rank));
  }
  const int32_t num_experts = options_.common.placement->num_experts();
  const absl::Span<const int32_t> ids(batch.ids,
                                      static_cast<size_t>(batch.num_tokens) * step.top_k);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= -1 && ids[i] < num_experts) continue;
    return absl::InvalidArgumentError(absl::StrCat("id of token ", i / step.top_k, ", choice ",
                                                   i % step.top_k, " is ", ids[i],
                                                   ", must be -1 or below ", num_experts));
  }
  const auto* rows = batch.row_in_request;
  if (std::any_of(rows, rows + batch.num_tokens, [](int32_t row) { return row < 0; })) {
    return absl::InvalidArgumentError("row_in_request must not be negative");
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::Submit(const MoeStep& step, Done done) {
  if (absl::Status status = Validate(step); !status.ok()) return status;
  if (absl::Status status = thread_->health(); !status.ok()) return status;
  // Posted under the lock, so that the device thread gets steps in the order of their indices.
  std::lock_guard lock(mutex_);
  if (!abort_reason_.ok()) return abort_reason_;
  if (in_flight_ >= limits::kStepsInFlight) {
    return absl::ResourceExhaustedError(
        absl::StrCat(in_flight_, " steps are in flight, at most ", limits::kStepsInFlight));
  }
  ++in_flight_;
  const int index = static_cast<int>(submitted_++ % limits::kStepsInFlight);
  const DeviceLayer* layer = FindLayer(step.layer);
  thread_->Post(
      [this, step, layer, index](cudaStream_t stream) {
        return memory_->runner->Enqueue(step, *layer, index, stream);
      },
      options_.step_timeout,
      [this, index, done = std::move(done)](absl::Status status) {
        Finished(index, std::move(status), done);
      });
  return absl::OkStatus();
}

// On the device thread.
void CudaBackend::Finished(int index, absl::Status status, const Done& done) {
  StepResult result;
  if (status.ok()) status = memory_->runner->Collect(index, &result.timing);
  result.status = std::move(status);
  {
    std::lock_guard lock(mutex_);
    --in_flight_;
    if (!abort_reason_.ok() && !IsFatal(result.status)) result.status = abort_reason_;
  }
  done(std::move(result));
}

void CudaBackend::AbortSteps(const absl::Status& reason) {
  EXPERTD_CHECK(!reason.ok());
  {
    std::lock_guard lock(mutex_);
    if (!abort_reason_.ok()) return;
    abort_reason_ = reason;
  }
  memory_->runner->Stop(/*for_good=*/true);
}

absl::Status CheckLayers(const BackendOptions& options) {
  for (const LayerSpec& spec : options.layers) {
    const absl::Status shape =
        CheckLayerShape(KernelShapeOf(spec, options.placement->slots_per_rank()));
    if (!shape.ok()) {
      return absl::Status(shape.code(), absl::StrCat("layer ", spec.layer, ": ", shape.message()));
    }
    const LayerSpec& first = options.layers.front();
    if (spec.hidden_size != first.hidden_size ||
        spec.intermediate_size != first.intermediate_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", spec.layer, " is ", spec.hidden_size, " x ", spec.intermediate_size, ", layer ",
          first.layer, " is ", first.hidden_size, " x ", first.intermediate_size,
          ": the CUDA backend needs one shape for all layers"));
    }
    if (spec.num_experts != options.placement->num_experts()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", spec.layer, " has ", spec.num_experts,
                       " experts, the placement is for ", options.placement->num_experts()));
    }
  }
  return absl::OkStatus();
}

int DeviceOf(const std::vector<int32_t>& devices) { return devices.empty() ? 0 : devices[0]; }

absl::StatusOr<cudaDeviceProp> PropertiesOf(int device) {
  int count = 0;
  const absl::Status counted = EXPERTD_CUDA_STATUS(cudaGetDeviceCount(&count));
  if (absl::IsNotFound(counted)) {
    return absl::FailedPreconditionError(
        absl::StrCat("no CUDA device is usable: ", counted.message()));
  }
  if (!counted.ok()) return counted;
  if (count == 0) return absl::FailedPreconditionError("no CUDA device is visible");
  if (device < 0 || device >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("device ", device, " does not exist: ", count, " visible"));
  }
  cudaDeviceProp properties = {};
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, device));
  const absl::Status suited =
      CheckDevice(properties.major, properties.minor, properties.sharedMemPerBlockOptin);
  if (!suited.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("device ", device, " (", properties.name, "): ", suited.message()));
  }
  return properties;
}

}  // namespace

absl::Status CheckOptions(const BackendOptions& options) {
  if (options.placement == nullptr) return absl::InvalidArgumentError("no placement");
  if (options.layers.empty()) return absl::InvalidArgumentError("no layers to serve");
  if (absl::Status status = CheckLayers(options); !status.ok()) return status;
  if (options.max_tokens_per_rank < 1 || options.max_tokens_per_rank > limits::kMaxTokensPerRank) {
    return absl::InvalidArgumentError(absl::StrCat("max_tokens_per_rank is ",
                                                   options.max_tokens_per_rank, ", must be 1..",
                                                   limits::kMaxTokensPerRank));
  }
  const int32_t ranks = options.placement->num_ranks();
  if (ranks != 1 || options.devices.size() > 1) {
    return absl::UnimplementedError(absl::StrCat(
        std::max<size_t>(ranks, options.devices.size()),
        " ranks: the CUDA backend drives one GPU, until its kernel exchanges rows with "
        "others; use --ranks 1 and one device"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options) {
  if (absl::Status status = CheckOptions(options.common); !status.ok()) return status;
  const int device = DeviceOf(options.common.devices);
  absl::StatusOr<cudaDeviceProp> properties = PropertiesOf(device);
  if (!properties.ok()) return properties.status();
  return CudaBackend::Create(options, device, *properties);
}

}  // namespace expertd::cuda

namespace expertd {

absl::Status CheckCudaDevice(const std::vector<int32_t>& devices) {
  return cuda::PropertiesOf(cuda::DeviceOf(devices)).status();
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const BackendOptions& options) {
  cuda::CudaBackendOptions cuda_options;
  cuda_options.common = options;
  return cuda::MakeCudaBackend(cuda_options);
}

}  // namespace expertd
