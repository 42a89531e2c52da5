#include "kernels/cuda/device_group.h"

#include <algorithm>
#include <future>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/check.h"
#include "config/limits.h"
#include "kernels/fatal.h"

namespace expertd::cuda {

absl::StatusOr<std::unique_ptr<DeviceGroup>> DeviceGroup::Form(
    const CudaBackendOptions* options, const std::vector<DeviceInfo>& devices) {
  std::unique_ptr<DeviceGroup> group(new DeviceGroup(options));
  if (absl::Status status = group->Start(devices); !status.ok()) return status;
  const auto allocate = [](RankDevice& rank, cudaStream_t) { return rank.AllocateWeights(); };
  if (absl::Status status = group->OnEveryRank(allocate); !status.ok()) return status;
  if (absl::Status status = group->Connect(); !status.ok()) return status;
  const auto finish = [](RankDevice& rank, cudaStream_t) { return rank.AllocateSteps(); };
  if (absl::Status status = group->OnEveryRank(finish); !status.ok()) return status;
  return group;
}

// Contexts take a third of a second each: all at once.
absl::Status DeviceGroup::Start(const std::vector<DeviceInfo>& devices) {
  std::vector<std::future<absl::StatusOr<std::unique_ptr<RankDevice>>>> started;
  for (size_t i = 0; i < devices.size(); ++i) {
    started.push_back(std::async(std::launch::async, [this, i, &devices] {
      return RankDevice::Start(options_, static_cast<int32_t>(i), devices[i],
                               [this] { StopRunning(); });
    }));
  }
  absl::Status first;
  for (auto& future : started) {
    absl::StatusOr<std::unique_ptr<RankDevice>> rank = future.get();
    first.Update(rank.status());
    if (rank.ok()) ranks_.push_back(*std::move(rank));
  }
  return first;
}

absl::Status DeviceGroup::Connect() {
  description_ = options_->path == KernelPath::kFused ? "fused kernel" : "plain kernels";
  if (num_ranks() == 1) return absl::OkStatus();
  const absl::StatusOr<ncclUniqueId> id = MakeCommunicatorId();
  if (!id.ok()) return id.status();
  const auto connect = [&](RankDevice& rank, cudaStream_t) { return rank.Connect(*id); };
  if (absl::Status status = OnEveryRank(connect); !status.ok()) return status;
  const bool bf16 = options_->common.partials == DType::kBf16;
  const std::string partials = absl::StrCat("partial rows ", bf16 ? "BF16" : "F32");
  // Every rank has the same answer.
  const Communicator& communicator = rank(0).communicator();
  if (communicator.mapped() && options_->path == KernelPath::kFused) {
    absl::StrAppend(&description_, ", ", num_ranks(), " ranks exchange rows inside it, ", partials);
    return OnEveryRank(
        [](RankDevice& rank, cudaStream_t stream) { return rank.OpenWindow(stream); });
  }
  description_ = absl::StrCat(
      "fused kernel, ", num_ranks(), " ranks exchange rows through host-launched NCCL (",
      communicator.mapped() ? "as asked for" : communicator.why_not_mapped(), "), ", partials);
  return OnEveryRank([](RankDevice& rank, cudaStream_t) { return rank.UseHostExchange(); });
}

// Steps that were submitted end on all ranks before the first of them frees its window.
DeviceGroup::~DeviceGroup() {
  OnEveryRank([](RankDevice&, cudaStream_t) { return absl::OkStatus(); }).IgnoreError();
  ranks_.clear();
}

absl::Status DeviceGroup::OnEveryRank(const Work& work) {
  std::vector<std::promise<absl::Status>> ends(ranks_.size());
  for (size_t i = 0; i < ranks_.size(); ++i) {
    RankDevice& rank = *ranks_[i];
    rank.thread().Post([&work, &rank](cudaStream_t stream) { return work(rank, stream); },
                       absl::InfiniteDuration(),
                       [&end = ends[i]](absl::Status status) { end.set_value(std::move(status)); });
  }
  std::vector<RankResult> results;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    results.push_back({static_cast<int32_t>(i), ends[i].get_future().get(), {}});
  }
  std::stable_partition(results.begin(), results.end(), [](const RankResult& result) {
    return !absl::IsDeadlineExceeded(result.status);
  });
  return DescribeFailure(results);
}

absl::Status DeviceGroup::Submit(const MoeStep& step, int32_t layer, Backend::Done done) {
  for (const auto& rank : ranks_) {
    if (absl::Status status = rank->thread().health(); !status.ok()) return status;
  }
  absl::StatusOr<std::shared_ptr<StepRun>> admitted = Admit(step);
  if (!admitted.ok()) return admitted.status();
  const std::shared_ptr<StepRun>& run = *admitted;
  run->done = std::move(done);
  for (const auto& rank : ranks_) {
    rank->thread().Post(
        [run, layer, r = rank.get()](cudaStream_t stream) {
          return r->runner().Enqueue(run->order, r->layers()[layer], stream);
        },
        options_->common.step_timeout,
        [this, run, r = rank.get()](absl::Status status) { Finished(*r, run, std::move(status)); });
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<DeviceGroup::StepRun>> DeviceGroup::Admit(const MoeStep& step) {
  auto run = std::make_shared<StepRun>();
  run->step = step;
  run->order.step = &run->step;
  for (const RankBatch& batch : step.ranks) {
    run->order.max_tokens = std::max(run->order.max_tokens, batch.num_tokens);
  }
  const auto launches =
      static_cast<uint32_t>(rank(0).runner().NumParts(run->order.max_tokens, step.top_k));
  std::unique_lock lock(mutex_);
  if (!abort_reason_.ok()) return abort_reason_;
  if (in_flight_ >= limits::kStepsInFlight) {
    return absl::ResourceExhaustedError(
        absl::StrCat(in_flight_, " steps are in flight, at most ", limits::kStepsInFlight));
  }
  if (absl::Status status = ResetIfNeeded(lock, launches); !status.ok()) return status;
  ++in_flight_;
  run->order.index = static_cast<int>(submitted_++ % limits::kStepsInFlight);
  run->order.kernel_step = kernel_step_ + 1;
  run->epoch = epoch_;
  kernel_step_ += launches;
  return run;
}

// The number of a launch must not come twice; at 2^32 of them all starts anew.
absl::Status DeviceGroup::ResetIfNeeded(std::unique_lock<std::mutex>& lock, uint32_t launches) {
  if (!needs_reset_ && launches < std::numeric_limits<uint32_t>::max() - kernel_step_) {
    return absl::OkStatus();
  }
  ended_.wait(lock, [this] { return in_flight_ == 0; });
  if (!abort_reason_.ok()) return abort_reason_;
  lock.unlock();
  const absl::Status reset = OnEveryRank(
      [](RankDevice& rank, cudaStream_t stream) { return rank.runner().Reset(stream); });
  lock.lock();
  if (!reset.ok()) return reset;
  needs_reset_ = false;
  kernel_step_ = 0;
  ++epoch_;
  return abort_reason_;
}

// On the rank's device thread. Each rank ends steps in order, so the last rank of step s calls its
// `done` before it can end s + 1: callbacks come in order of submission.
void DeviceGroup::Finished(RankDevice& rank, const std::shared_ptr<StepRun>& run,
                           absl::Status status) {
  StepTiming timing;
  RankResult ended = {rank.rank(), std::move(status), {}};
  if (ended.status.ok()) ended = rank.runner().Collect(run->order, &timing);
  if (Failed(ended)) StopRunning();
  StepResult result;
  {
    std::lock_guard lock(mutex_);
    run->results.push_back(std::move(ended));
    run->timing.copy_in_us = std::max(run->timing.copy_in_us, timing.copy_in_us);
    run->timing.kernel_us = std::max(run->timing.kernel_us, timing.kernel_us);
    run->timing.copy_out_us = std::max(run->timing.copy_out_us, timing.copy_out_us);
    if (run->results.size() < ranks_.size()) return;
    result.status = Conclude(*run);
    result.timing = run->timing;
    --in_flight_;
  }
  ended_.notify_all();
  run->done(std::move(result));
}

// Under the lock.
absl::Status DeviceGroup::Conclude(const StepRun& run) {
  absl::Status status = DescribeFailure(run.results);
  if (!status.ok()) {
    failed_epoch_ = run.epoch;
  } else if (failed_epoch_ == run.epoch) {
    status = absl::UnavailableError("the step ran behind one that the GPU gave up");
  }
  return abort_reason_.ok() || IsFatal(status) ? status : abort_reason_;
}

// Whoever ends a step early ends it for all: the other ranks would only wait for it.
void DeviceGroup::StopRunning() {
  {
    std::lock_guard lock(mutex_);
    needs_reset_ = true;
  }
  for (const auto& rank : ranks_) rank->runner().Stop(/*for_good=*/false);
}

void DeviceGroup::Abort(const absl::Status& reason) {
  EXPERTD_CHECK(!reason.ok());
  {
    std::lock_guard lock(mutex_);
    if (!abort_reason_.ok()) return;
    abort_reason_ = reason;
  }
  for (const auto& rank : ranks_) rank->runner().Stop(/*for_good=*/true);
}

}  // namespace expertd::cuda
