#include "kernels/cuda/weight_sink.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/limits.h"
#include "kernels/cuda/check.h"

namespace expertd::cuda {
namespace {

constexpr size_t kMissingNamed = 10;  // the rest is counted

std::string NameOf(int32_t layer, int32_t slot, Matrix matrix) {
  const std::string_view name = MatrixName(matrix);
  return absl::StrCat("layer ", layer, " slot ", slot, " ",
                      absl::string_view(name.data(), name.size()));
}

std::string NameOf(const MatrixId& id) { return NameOf(id.layer, id.slot, id.matrix); }

}  // namespace

CudaWeightSink::CudaWeightSink(const std::vector<DeviceLayer>* layers,
                               std::shared_ptr<const Placement> placement, DeviceThread* thread)
    : layers_(layers), placement_(std::move(placement)), thread_(thread) {}

absl::StatusOr<std::unique_ptr<CudaWeightSink>> CudaWeightSink::Create(
    const std::vector<DeviceLayer>* layers, std::shared_ptr<const Placement> placement,
    DeviceThread* thread) {
  std::unique_ptr<CudaWeightSink> sink(new CudaWeightSink(layers, std::move(placement), thread));
  std::vector<LayerSpec> specs;
  for (const DeviceLayer& layer : *layers) specs.push_back(layer.spec);
  sink->layout_ = PlanStaging(specs);
  sink->buffers_.resize(NumStagingBuffers(sink->layout_));
  const absl::Status status = thread->Run([&](cudaStream_t) -> absl::Status {
    for (Buffer& buffer : sink->buffers_) {
      auto pinned = MemoryBlock::Allocate(MemoryKind::kPinned, sink->layout_.scratch);
      if (!pinned.ok()) return pinned.status();
      auto device = MemoryBlock::Allocate(MemoryKind::kDevice, sink->layout_.bytes);
      if (!device.ok()) return device.status();
      buffer = {*std::move(pinned), *std::move(device)};
    }
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  for (size_t i = 0; i < sink->buffers_.size(); ++i) sink->free_.push_back(static_cast<int32_t>(i));
  return sink;
}

CudaWeightSink::~CudaWeightSink() {
  const absl::Status status = thread_->Run([this](cudaStream_t) {
    buffers_.clear();
    return absl::OkStatus();
  });
  if (!status.ok())
    new std::vector<Buffer>(std::move(buffers_));  // never freed, see DeviceThread::health
}

const DeviceLayer* CudaWeightSink::Find(const MatrixId& id) const {
  const auto found = std::find_if(layers_->begin(), layers_->end(), [&](const DeviceLayer& layer) {
    return layer.spec.layer == id.layer;
  });
  return found == layers_->end() ? nullptr : &*found;
}

absl::Status CudaWeightSink::Check(const MatrixId& id) const {
  if (id.rank != 0)
    return absl::NotFoundError(absl::StrCat("rank ", id.rank, ": this process has rank 0"));
  if (Find(id) == nullptr || id.slot < 0 || id.slot >= placement_->slots_per_rank()) {
    return absl::NotFoundError(absl::StrCat("no ", NameOf(id)));
  }
  return absl::OkStatus();
}

absl::StatusOr<MatrixBuffers> CudaWeightSink::Reserve(const MatrixId& id, absl::Time deadline) {
  if (absl::Status status = Check(id); !status.ok()) return status;
  std::unique_lock lock(mutex_);
  if (finished_) return absl::FailedPreconditionError("the weights are loaded already");
  if (entries_.count({id.layer, id.slot, id.matrix}) != 0) {
    return absl::AlreadyExistsError(absl::StrCat("reserved twice: ", NameOf(id)));
  }
  const bool in_time = changed_.wait_until(lock, absl::ToChronoTime(deadline),
                                           [&] { return !free_.empty() || !failure_.ok(); });
  if (!failure_.ok()) return failure_;
  if (!in_time) {
    return absl::DeadlineExceededError(absl::StrCat(
        "all ", buffers_.size(), " loading buffers are in use, waited for by ", NameOf(id)));
  }
  const int32_t buffer = free_.back();
  free_.pop_back();
  entries_[{id.layer, id.slot, id.matrix}] = {State::kReserved, buffer};
  const LayerSpec& spec = Find(id)->spec;
  const MatrixShape shape = ShapeOf(spec, id.matrix);
  auto* base = buffers_[buffer].pinned.as<uint8_t>();
  return MatrixBuffers{
      absl::MakeSpan(base, static_cast<size_t>(shape.CodeBytes())),
      absl::MakeSpan(base + layout_.scales, static_cast<size_t>(shape.ScaleBytes(spec.recipe)))};
}

absl::Status CudaWeightSink::Commit(const MatrixId& id, float second_level) {
  if (absl::Status status = Check(id); !status.ok()) return status;
  if (!std::isfinite(second_level) || second_level <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(NameOf(id), ": second-level scale is ",
                                                   second_level, ", must be finite and positive"));
  }
  int32_t buffer;
  {
    std::lock_guard lock(mutex_);
    const auto entry = entries_.find({id.layer, id.slot, id.matrix});
    if (entry == entries_.end() || entry->second.state != State::kReserved) {
      return absl::FailedPreconditionError(absl::StrCat("not reserved, or done: ", NameOf(id)));
    }
    if (!failure_.ok()) return failure_;
    buffer = entry->second.buffer;
    entry->second = {State::kCommitted, -1};
    ++packing_;
  }
  thread_->Post([this, id, second_level, buffer](
                    cudaStream_t stream) { return CopyAndPack(id, second_level, buffer, stream); },
                absl::Milliseconds(limits::kStepTimeoutMs),
                [this, buffer](const absl::Status& status) { Packed(buffer, status); });
  return absl::OkStatus();
}

absl::Status CudaWeightSink::CopyAndPack(const MatrixId& id, float second_level, int32_t buffer,
                                         cudaStream_t stream) const {
  const DeviceLayer& layer = *Find(id);
  const MatrixShape shape = ShapeOf(layer.spec, id.matrix);
  const auto* from = buffers_[buffer].pinned.as<uint8_t>();
  auto* to = buffers_[buffer].device.as<uint8_t>();
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(to, from, shape.CodeBytes(), cudaMemcpyHostToDevice, stream));
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(to + layout_.scales, from + layout_.scales,
                                               shape.ScaleBytes(layer.spec.recipe),
                                               cudaMemcpyHostToDevice, stream));
  return LaunchPack(layer.spec, layer.packed, id.slot, id.matrix, to, to + layout_.scales,
                    second_level, to + layout_.scratch, stream);
}

// On the device thread.
void CudaWeightSink::Packed(int32_t buffer, const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    --packing_;
    free_.push_back(buffer);
    if (failure_.ok()) failure_ = status;
  }
  changed_.notify_all();
}

std::vector<std::string> CudaWeightSink::Missing() const {
  std::vector<std::string> missing;
  for (const DeviceLayer& layer : *layers_) {
    for (int32_t slot = 0; slot < placement_->slots_per_rank(); ++slot) {
      if (placement_->ExpertAt(0, slot) < 0) continue;
      for (int m = 0; m < kNumMatrices; ++m) {
        const auto matrix = static_cast<Matrix>(m);
        const auto entry = entries_.find({layer.spec.layer, slot, matrix});
        if (entry != entries_.end() && entry->second.state == State::kCommitted) continue;
        missing.push_back(NameOf(layer.spec.layer, slot, matrix));
      }
    }
  }
  return missing;
}

absl::Status CudaWeightSink::Finish() {
  {
    std::unique_lock lock(mutex_);
    // Each packing job has a limit of its own.
    changed_.wait(lock, [this] { return packing_ == 0; });
    if (!failure_.ok()) return failure_;
    std::vector<std::string> missing = Missing();
    if (!missing.empty()) {
      const size_t count = missing.size();
      missing.resize(std::min(count, kMissingNamed));
      return absl::FailedPreconditionError(
          absl::StrCat(count, " matrices were not loaded: ", absl::StrJoin(missing, ", "),
                       count > kMissingNamed ? ", ..." : ""));
    }
  }
  if (absl::Status status = thread_->Run([this](cudaStream_t) {
        buffers_.clear();
        return absl::OkStatus();
      });
      !status.ok()) {
    return status;
  }
  std::lock_guard lock(mutex_);
  finished_ = true;
  return absl::OkStatus();
}

bool CudaWeightSink::finished() const {
  std::lock_guard lock(mutex_);
  return finished_;
}

}  // namespace expertd::cuda
