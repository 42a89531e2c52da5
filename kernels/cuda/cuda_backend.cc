#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/limits.h"
#include "kernels/cuda/device_choice.h"
#include "kernels/cuda/device_group.h"
#include "kernels/cuda/step_runner.h"
#include "kernels/cuda/weight_sink.h"
#include "kernels/step_memory_pool.h"

namespace expertd::cuda {
namespace {

class CudaBackend final : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<Backend>> Create(const CudaBackendOptions& options,
                                                         const std::vector<DeviceInfo>& devices);

  const BackendInfo& info() const override { return info_; }
  WeightSink& sink() override { return *sink_; }
  absl::StatusOr<StepMemory*> AcquireStep(absl::Time deadline) override {
    return memories_->Acquire(deadline);
  }
  void ReleaseStep(StepMemory* memory) override { memories_->Release(memory); }
  absl::Status Submit(const MoeStep& step, Done done) override;
  void AbortSteps(const absl::Status& reason) override { group_->Abort(reason); }

 private:
  explicit CudaBackend(const CudaBackendOptions& options) : options_(options) {}
  absl::Status SetUp(const std::vector<DeviceInfo>& devices);
  void FillInfo(const std::vector<DeviceInfo>& devices);
  int32_t LayerIndex(int32_t layer) const;
  absl::Status Validate(const MoeStep& step) const;
  absl::Status ValidateBatch(const RankBatch& batch, int32_t top_k) const;

  const CudaBackendOptions options_;
  BackendInfo info_;
  std::unique_ptr<DeviceGroup> group_;
  std::unique_ptr<StepMemoryPool> memories_;
  std::unique_ptr<CudaWeightSink> sink_;
};

absl::StatusOr<std::unique_ptr<Backend>> CudaBackend::Create(
    const CudaBackendOptions& options, const std::vector<DeviceInfo>& devices) {
  std::unique_ptr<CudaBackend> backend(new CudaBackend(options));
  if (absl::Status status = backend->SetUp(devices); !status.ok()) return status;
  return backend;
}

absl::Status CudaBackend::SetUp(const std::vector<DeviceInfo>& devices) {
  auto group = DeviceGroup::Form(&options_, devices);
  if (!group.ok()) return group.status();
  group_ = *std::move(group);
  const BackendOptions& common = options_.common;
  std::vector<CudaWeightSink::Rank> sink_ranks;
  std::vector<std::vector<uint8_t*>> parts(limits::kStepMemories);
  for (int32_t i = 0; i < group_->num_ranks(); ++i) {
    RankDevice& rank = group_->rank(i);
    sink_ranks.push_back({&rank.layers(), &rank.thread()});
    const std::vector<uint8_t*> own = rank.step_memories();
    for (size_t m = 0; m < parts.size(); ++m) parts[m].push_back(own[m]);
  }
  memories_ = std::make_unique<StepMemoryPool>(
      StepMemoryPool::Shape{common.max_tokens_per_rank, common.layers[0].hidden_size}, parts);
  auto sink = CudaWeightSink::Create(std::move(sink_ranks), common.placement);
  if (!sink.ok()) return sink.status();
  sink_ = *std::move(sink);
  FillInfo(devices);
  return absl::OkStatus();
}

void CudaBackend::FillInfo(const std::vector<DeviceInfo>& devices) {
  info_.name = "cuda";
  info_.num_ranks = group_->num_ranks();
  info_.max_tokens_per_rank = options_.common.max_tokens_per_rank;
  for (int32_t i = 0; i < info_.num_ranks; ++i) {
    info_.devices.push_back(devices[i].description);
    info_.weight_bytes += group_->rank(i).weight_bytes();
    info_.workspace_bytes += group_->rank(i).workspace_bytes();
  }
  info_.detail = absl::StrCat("sm_90a, ", group_->description());
}

int32_t CudaBackend::LayerIndex(int32_t layer) const {
  const std::vector<LayerSpec>& layers = options_.common.layers;
  const auto found = std::find_if(layers.begin(), layers.end(),
                                  [layer](const LayerSpec& l) { return l.layer == layer; });
  return found == layers.end() ? -1 : static_cast<int32_t>(found - layers.begin());
}

absl::Status CudaBackend::Validate(const MoeStep& step) const {
  if (!sink_->finished()) return absl::FailedPreconditionError("the weights are not loaded");
  if (LayerIndex(step.layer) < 0) {
    return absl::NotFoundError(absl::StrCat("layer ", step.layer, " is not served"));
  }
  if (step.top_k < 1 || step.top_k > limits::kMaxTopK) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", step.top_k, ", must be 1..", limits::kMaxTopK));
  }
  if (static_cast<int32_t>(step.ranks.size()) != info_.num_ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step has ", step.ranks.size(), " ranks, the process ", info_.num_ranks));
  }
  for (int32_t rank = 0; rank < info_.num_ranks; ++rank) {
    const absl::Status status = ValidateBatch(step.ranks[rank], step.top_k);
    if (status.ok()) continue;
    if (info_.num_ranks == 1) return status;
    return absl::Status(status.code(), absl::StrCat("rank ", rank, ": ", status.message()));
  }
  return absl::OkStatus();
}

// Ids are looked at again here: a wrong one would send the kernel outside its tables.
absl::Status CudaBackend::ValidateBatch(const RankBatch& batch, int32_t top_k) const {
  if (batch.num_tokens < 0 || batch.num_tokens > options_.common.max_tokens_per_rank) {
    return absl::InvalidArgumentError(absl::StrCat("got ", batch.num_tokens,
                                                   " tokens, the buffer is sized for ",
                                                   options_.common.max_tokens_per_rank));
  }
  const int32_t num_experts = options_.common.placement->num_experts();
  const absl::Span<const int32_t> ids(batch.ids, static_cast<size_t>(batch.num_tokens) * top_k);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= -1 && ids[i] < num_experts) continue;
    return absl::InvalidArgumentError(absl::StrCat("id of token ", i / top_k, ", choice ",
                                                   i % top_k, " is ", ids[i],
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
  return group_->Submit(step, LayerIndex(step.layer), std::move(done));
}

absl::Status CheckLayers(const BackendOptions& options) {
  const Placement& placement = *options.placement;
  for (const LayerSpec& spec : options.layers) {
    const absl::Status shape =
        CheckLayerShape(KernelShapeOf(spec, placement.slots_per_rank(), placement.num_ranks()));
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
    if (spec.num_experts != placement.num_experts()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", spec.layer, " has ", spec.num_experts,
                       " experts, the placement is for ", placement.num_experts()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckOptions(const CudaBackendOptions& options) {
  const BackendOptions& common = options.common;
  if (common.placement == nullptr) return absl::InvalidArgumentError("no placement");
  if (common.layers.empty()) return absl::InvalidArgumentError("no layers to serve");
  if (absl::Status status = CheckLayers(common); !status.ok()) return status;
  if (common.max_tokens_per_rank < 1 || common.max_tokens_per_rank > limits::kMaxTokensPerRank) {
    return absl::InvalidArgumentError(absl::StrCat("max_tokens_per_rank is ",
                                                   common.max_tokens_per_rank, ", must be 1..",
                                                   limits::kMaxTokensPerRank));
  }
  const int32_t ranks = common.placement->num_ranks();
  if (ranks > layout::kMaxKernelRanks) {
    return absl::InvalidArgumentError(absl::StrCat("ranks: found ", ranks, ", expected at most ",
                                                   layout::kMaxKernelRanks,
                                                   " for the CUDA backend"));
  }
  if (ranks > 1 && options.path == KernelPath::kUnfused) {
    return absl::InvalidArgumentError("the plain kernels compute for one rank");
  }
  if (ranks == 1 && options.path == KernelPath::kHostExchange) {
    return absl::InvalidArgumentError("one rank exchanges no rows");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  const auto devices = FindDevices(options.common.devices, options.common.placement->num_ranks());
  if (!devices.ok()) return devices.status();
  return CudaBackend::Create(options, *devices);
}

}  // namespace expertd::cuda

namespace expertd {

absl::StatusOr<std::vector<int32_t>> FindCudaDevices(const std::vector<int32_t>& devices,
                                                     int32_t ranks) {
  const auto found = cuda::FindDevices(devices, ranks);
  if (!found.ok()) return found.status();
  std::vector<int32_t> numbers;
  for (const cuda::DeviceInfo& info : *found) numbers.push_back(info.device);
  return numbers;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const BackendOptions& options) {
  cuda::CudaBackendOptions cuda_options;
  cuda_options.common = options;
  return cuda::MakeCudaBackend(cuda_options);
}

}  // namespace expertd
