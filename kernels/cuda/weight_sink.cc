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

std::string NameOf(const MatrixId& id, bool several) {
  const std::string_view name = MatrixName(id.matrix);
  return absl::StrCat(several ? absl::StrCat("rank ", id.rank, " ") : "", "layer ", id.layer,
                      " slot ", id.slot, " ", absl::string_view(name.data(), name.size()));
}

}  // namespace

CudaWeightSink::CudaWeightSink(std::vector<Rank> ranks, std::shared_ptr<const Placement> placement)
    : placement_(std::move(placement)), pools_(ranks.size()) {
  for (size_t i = 0; i < ranks.size(); ++i) pools_[i].rank = ranks[i];
}

absl::StatusOr<std::unique_ptr<CudaWeightSink>> CudaWeightSink::Create(
    std::vector<Rank> ranks, std::shared_ptr<const Placement> placement) {
  std::vector<LayerSpec> specs;
  for (const DeviceLayer& layer : *ranks[0].layers) specs.push_back(layer.spec);
  std::unique_ptr<CudaWeightSink> sink(new CudaWeightSink(std::move(ranks), std::move(placement)));
  sink->layout_ = PlanStaging(specs);
  for (Pool& pool : sink->pools_) {
    if (absl::Status status = sink->Allocate(&pool); !status.ok()) return status;
  }
  return sink;
}

absl::Status CudaWeightSink::Allocate(Pool* pool) const {
  pool->buffers.resize(NumStagingBuffers(layout_));
  const absl::Status status = pool->rank.thread->Run([&](cudaStream_t) -> absl::Status {
    for (Buffer& buffer : pool->buffers) {
      auto pinned = MemoryBlock::Allocate(MemoryKind::kPinned, layout_.scratch);
      if (!pinned.ok()) return pinned.status();
      auto device = MemoryBlock::Allocate(MemoryKind::kDevice, layout_.bytes);
      if (!device.ok()) return device.status();
      buffer = {*std::move(pinned), *std::move(device)};
    }
    return absl::OkStatus();
  });
  for (size_t i = 0; i < pool->buffers.size(); ++i) pool->free.push_back(static_cast<int32_t>(i));
  return status;
}

absl::Status CudaWeightSink::FreeBuffers() {
  absl::Status first;
  for (Pool& pool : pools_) {
    const absl::Status status = pool.rank.thread->Run([&pool](cudaStream_t) {
      pool.buffers.clear();
      return absl::OkStatus();
    });
    if (!status.ok()) {
      new std::vector<Buffer>(std::move(pool.buffers));  // never freed, see DeviceThread::health
    }
    first.Update(status);
  }
  return first;
}

CudaWeightSink::~CudaWeightSink() { FreeBuffers().IgnoreError(); }

const DeviceLayer* CudaWeightSink::Find(const MatrixId& id) const {
  const std::vector<DeviceLayer>& layers = *pools_[id.rank].rank.layers;
  const auto found = std::find_if(layers.begin(), layers.end(), [&](const DeviceLayer& layer) {
    return layer.spec.layer == id.layer;
  });
  return found == layers.end() ? nullptr : &*found;
}

absl::Status CudaWeightSink::Check(const MatrixId& id) const {
  const auto ranks = static_cast<int32_t>(pools_.size());
  if (id.rank < 0 || id.rank >= ranks) {
    return absl::NotFoundError(absl::StrCat("rank ", id.rank, ": this process has ", ranks,
                                            ranks == 1 ? " rank" : " ranks"));
  }
  if (Find(id) == nullptr || id.slot < 0 || id.slot >= placement_->slots_per_rank()) {
    return absl::NotFoundError(absl::StrCat("no ", NameOf(id, ranks > 1)));
  }
  return absl::OkStatus();
}

absl::StatusOr<MatrixBuffers> CudaWeightSink::Reserve(const MatrixId& id, absl::Time deadline) {
  if (absl::Status status = Check(id); !status.ok()) return status;
  std::unique_lock lock(mutex_);
  if (finished_) return absl::FailedPreconditionError("the weights are loaded already");
  const Key key = {id.rank, id.layer, id.slot, id.matrix};
  Pool& pool = pools_[id.rank];
  const bool several = pools_.size() > 1;
  if (entries_.count(key) != 0) {
    return absl::AlreadyExistsError(absl::StrCat("reserved twice: ", NameOf(id, several)));
  }
  const bool in_time = changed_.wait_until(lock, absl::ToChronoTime(deadline),
                                           [&] { return !pool.free.empty() || !failure_.ok(); });
  if (!failure_.ok()) return failure_;
  if (!in_time) {
    return absl::DeadlineExceededError(absl::StrCat("all ", pool.buffers.size(),
                                                    " loading buffers are in use, waited for by ",
                                                    NameOf(id, several)));
  }
  const int32_t buffer = pool.free.back();
  pool.free.pop_back();
  entries_[key] = {State::kReserved, buffer};
  const LayerSpec& spec = Find(id)->spec;
  const MatrixShape shape = ShapeOf(spec, id.matrix);
  auto* base = pool.buffers[buffer].pinned.as<uint8_t>();
  return MatrixBuffers{
      absl::MakeSpan(base, static_cast<size_t>(shape.CodeBytes())),
      absl::MakeSpan(base + layout_.scales, static_cast<size_t>(shape.ScaleBytes(spec.recipe)))};
}

absl::Status CudaWeightSink::Commit(const MatrixId& id, float second_level) {
  if (absl::Status status = Check(id); !status.ok()) return status;
  const std::string name = NameOf(id, pools_.size() > 1);
  if (!std::isfinite(second_level) || second_level <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": second-level scale is ", second_level,
                                                   ", must be finite and positive"));
  }
  int32_t buffer;
  {
    std::lock_guard lock(mutex_);
    const auto entry = entries_.find({id.rank, id.layer, id.slot, id.matrix});
    if (entry == entries_.end() || entry->second.state != State::kReserved) {
      return absl::FailedPreconditionError(absl::StrCat("not reserved, or done: ", name));
    }
    if (!failure_.ok()) return failure_;
    buffer = entry->second.buffer;
    entry->second = {State::kCommitted, -1};
    ++packing_;
  }
  pools_[id.rank].rank.thread->Post(
      [this, id, second_level, buffer](cudaStream_t stream) {
        return CopyAndPack(id, second_level, buffer, stream);
      },
      absl::Milliseconds(limits::kStepTimeoutMs),
      [this, rank = id.rank, buffer](const absl::Status& status) { Packed(rank, buffer, status); });
  return absl::OkStatus();
}

absl::Status CudaWeightSink::CopyAndPack(const MatrixId& id, float second_level, int32_t buffer,
                                         cudaStream_t stream) const {
  const DeviceLayer& layer = *Find(id);
  const MatrixShape shape = ShapeOf(layer.spec, id.matrix);
  const Buffer& staging = pools_[id.rank].buffers[buffer];
  const auto* from = staging.pinned.as<uint8_t>();
  auto* to = staging.device.as<uint8_t>();
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(to, from, shape.CodeBytes(), cudaMemcpyHostToDevice, stream));
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(to + layout_.scales, from + layout_.scales,
                                               shape.ScaleBytes(layer.spec.recipe),
                                               cudaMemcpyHostToDevice, stream));
  return LaunchPack(layer.spec, layer.packed, id.slot, id.matrix, to, to + layout_.scales,
                    second_level, to + layout_.scratch, stream);
}

// On the rank's device thread.
void CudaWeightSink::Packed(int32_t rank, int32_t buffer, const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    --packing_;
    pools_[rank].free.push_back(buffer);
    if (failure_.ok()) failure_ = status;
  }
  changed_.notify_all();
}

std::vector<std::string> CudaWeightSink::Missing() const {
  std::vector<std::string> missing;
  const auto look_for = [&](const MatrixId& id) {
    const auto entry = entries_.find({id.rank, id.layer, id.slot, id.matrix});
    if (entry != entries_.end() && entry->second.state == State::kCommitted) return;
    missing.push_back(NameOf(id, pools_.size() > 1));
  };
  for (int32_t rank = 0; rank < static_cast<int32_t>(pools_.size()); ++rank) {
    for (const DeviceLayer& layer : *pools_[rank].rank.layers) {
      for (int32_t slot = 0; slot < placement_->slots_per_rank(); ++slot) {
        if (placement_->ExpertAt(rank, slot) < 0) continue;
        for (int m = 0; m < kNumMatrices; ++m) {
          look_for({rank, layer.spec.layer, slot, static_cast<Matrix>(m)});
        }
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
  if (absl::Status status = FreeBuffers(); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  finished_ = true;
  return absl::OkStatus();
}

bool CudaWeightSink::finished() const {
  std::lock_guard lock(mutex_);
  return finished_;
}

}  // namespace expertd::cuda
