#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/check.h"
#include "kernels/cpu/mapped_memory.h"
#include "kernels/cpu/rank_worker.h"
#include "kernels/cpu/weight_store.h"
#include "kernels/step_memory_pool.h"

namespace expertd::cpu {
namespace {

// A submitted step. Every local rank runs it once; the last to finish calls `done`. Since each rank
// runs steps in order, the last rank of step s calls its `done` before it can finish s + 1:
// callbacks come in submission order without further locking.
struct StepRun {
  MoeStep step;
  int32_t layer_index = 0;
  Backend::Done done;
  std::mutex mutex;  // guards what follows
  bool started = false;
  absl::Time start;
  StepLimit limit;
  int32_t ranks_left = 0;
  absl::Status status;  // the first failure
};

class CpuBackend final : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<Backend>> Create(const CpuBackendOptions& options);
  ~CpuBackend() override;

  const BackendInfo& info() const override { return info_; }
  WeightSink& sink() override { return *weights_; }
  absl::StatusOr<StepMemory*> AcquireStep(absl::Time deadline) override {
    return memories_->Acquire(deadline);
  }
  void ReleaseStep(StepMemory* memory) override { memories_->Release(memory); }
  absl::Status Submit(const MoeStep& step, Done done) override;
  void AbortSteps(const absl::Status& reason) override;

 private:
  struct Rank {
    std::unique_ptr<RankWorker> worker;
    std::deque<std::shared_ptr<StepRun>> queue;  // at most kStepsInFlight, guarded by mutex_
    std::thread thread;
  };

  explicit CpuBackend(const CpuBackendOptions& options);
  absl::Status CheckMemory() const;
  RankWorker::Config WorkerConfig(int32_t local_rank, int32_t max_tokens) const;
  int64_t WorkspaceBytes(int32_t max_tokens) const;
  StepMemoryPool::Shape MemoryShape(int32_t max_tokens) const { return {max_tokens, max_hidden_}; }
  absl::Status CreateMemories();
  absl::Status CreateRanks();
  void FillInfo();
  absl::Status Validate(const MoeStep& step) const;
  absl::Status ValidateBatch(const MoeStep& step, size_t rank) const;
  void RankLoop(Rank& rank);
  void RunOn(Rank& rank, StepRun& run);

  const CpuBackendOptions options_;
  int32_t num_threads_ = 0;  // of all ranks
  bool spin_ = false;
  int64_t max_hidden_ = 0;  // over the layers
  int64_t max_intermediate_ = 0;
  BackendInfo info_;
  std::unique_ptr<WeightStore> weights_;
  std::vector<MappedMemory> memory_blocks_;  // [kStepMemories], all ranks' parts
  std::unique_ptr<StepMemoryPool> memories_;
  std::atomic<bool> aborted_{false};

  std::mutex mutex_;
  std::condition_variable work_;  // rank threads wait for their queue
  bool stop_ = false;
  int32_t in_flight_ = 0;
  std::optional<std::pair<uint64_t, uint64_t>> last_submitted_;  // generation, step: they ascend
  absl::Status abort_reason_;
  std::vector<Rank> ranks_;
};

CpuBackend::CpuBackend(const CpuBackendOptions& options)
    : options_(options),
      weights_(std::make_unique<WeightStore>(options.common.layers, options.common.placement,
                                             options.first_rank, options.num_local_ranks)) {
  const auto cores = std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
  const int32_t wanted = options.common.num_threads > 0 ? options.common.num_threads : cores;
  num_threads_ = std::max(wanted, options.num_local_ranks);  // a rank has at least one
  spin_ = num_threads_ <= cores;
  for (const LayerSpec& spec : options.common.layers) {
    max_hidden_ = std::max(max_hidden_, spec.hidden_size);
    max_intermediate_ = std::max(max_intermediate_, spec.intermediate_size);
  }
}

absl::Status ValidateLayers(const BackendOptions& options) {
  if (options.layers.empty()) return absl::InvalidArgumentError("no layers to serve");
  for (const LayerSpec& spec : options.layers) {
    for (const auto& [name, size] : {std::pair("hidden_size", spec.hidden_size),
                                     std::pair("intermediate_size", spec.intermediate_size)}) {
      if (size <= 0 || size % limits::kGeometryMultiple != 0) {
        return absl::InvalidArgumentError(absl::StrCat("layer ", spec.layer, ": ", name, " is ",
                                                       size, ", must be a multiple of ",
                                                       limits::kGeometryMultiple));
      }
    }
    if (spec.num_experts != options.placement->num_experts()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", spec.layer, " has ", spec.num_experts,
                       " experts, the placement is for ", options.placement->num_experts()));
    }
    if (&spec != &options.layers.front() && (&spec - 1)->layer >= spec.layer) {
      return absl::InvalidArgumentError("layers must ascend");
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateOptions(const CpuBackendOptions& options) {
  const BackendOptions& common = options.common;
  if (common.placement == nullptr) return absl::InvalidArgumentError("no placement");
  if (absl::Status status = ValidateLayers(common); !status.ok()) return status;
  if (common.max_tokens_per_rank < 1 || common.max_tokens_per_rank > limits::kMaxTokensPerRank) {
    return absl::InvalidArgumentError(absl::StrCat("max_tokens_per_rank is ",
                                                   common.max_tokens_per_rank, ", must be 1..",
                                                   limits::kMaxTokensPerRank));
  }
  if (common.num_threads < 0 || common.num_threads > limits::kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_threads is ", common.num_threads, ", must be 0..", limits::kMaxThreads));
  }
  const int32_t group = common.placement->num_ranks();
  if (options.first_rank < 0 || options.num_local_ranks < 0 ||
      options.first_rank + options.num_local_ranks > group) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks ", options.first_rank, " + ", options.num_local_ranks, " of ", group));
  }
  if (options.exchange == nullptr && options.num_local_ranks != group) {
    return absl::InvalidArgumentError("ranks of other processes need an exchange");
  }
  if (options.exchange != nullptr && options.exchange->num_ranks() != group) {
    return absl::InvalidArgumentError(absl::StrCat("the exchange connects ",
                                                   options.exchange->num_ranks(),
                                                   " ranks, the placement has ", group));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Backend>> CpuBackend::Create(const CpuBackendOptions& given) {
  CpuBackendOptions options = given;
  if (options.common.placement != nullptr && options.num_local_ranks == 0) {
    options.num_local_ranks = options.common.placement->num_ranks() - options.first_rank;
  }
  if (absl::Status status = ValidateOptions(options); !status.ok()) return status;
  if (options.exchange == nullptr)
    options.exchange = MakeInProcessExchange(options.num_local_ranks);

  auto backend = std::unique_ptr<CpuBackend>(new CpuBackend(options));
  if (absl::Status status = backend->CheckMemory(); !status.ok()) return status;
  if (absl::Status status = backend->weights_->Map(); !status.ok()) return status;
  if (absl::Status status = backend->CreateMemories(); !status.ok()) return status;
  if (absl::Status status = backend->CreateRanks(); !status.ok()) return status;
  backend->FillInfo();
  return backend;
}

int64_t CpuBackend::WorkspaceBytes(int32_t max_tokens) const {
  int64_t bytes = int64_t{limits::kStepMemories} * options_.num_local_ranks *
                  StepMemoryPool::RankBytes(MemoryShape(max_tokens));
  for (int32_t rank = 0; rank < options_.num_local_ranks; ++rank) {
    bytes += RankWorker::WorkspaceBytes(WorkerConfig(rank, max_tokens));
  }
  return bytes;
}

// The mapped memory becomes real as it is touched: without this the system would end the process in
// the middle of a load or of the first large step.
absl::Status CpuBackend::CheckMemory() const {
  const MemoryLimit limit =
      options_.memory_limit.bytes > 0 ? options_.memory_limit : ReadMemoryLimit();
  const int32_t max_tokens = options_.common.max_tokens_per_rank;
  const int64_t available = limit.bytes - limits::kCpuReserveBytes - weights_->bytes();
  const int64_t workspace = WorkspaceBytes(max_tokens);
  if (workspace <= available) return absl::OkStatus();
  int32_t fits = 0;
  for (int32_t too_large = max_tokens; too_large - fits > 1;) {
    const int32_t middle = fits + (too_large - fits) / 2;
    (WorkspaceBytes(middle) <= available ? fits : too_large) = middle;
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "memory: ", weights_->bytes() + workspace, " bytes needed (weights ", weights_->bytes(),
      ", workspace ", workspace, " for max_tokens_per_rank ", max_tokens, "), found ", limit.bytes,
      " ", limit.source, " of which ", limits::kCpuReserveBytes, " stay in reserve; ",
      fits == 0 ? "no max_tokens_per_rank fits: serve fewer layers (--layers) or with fewer ranks"
                : absl::StrCat("the largest max_tokens_per_rank that fits is ", fits)));
}

absl::Status CpuBackend::CreateMemories() {
  const StepMemoryPool::Shape shape = MemoryShape(options_.common.max_tokens_per_rank);
  const int64_t rank_bytes = StepMemoryPool::RankBytes(shape);
  std::vector<std::vector<uint8_t*>> parts(limits::kStepMemories);
  for (std::vector<uint8_t*>& ranks : parts) {
    auto block = MappedMemory::Create(static_cast<size_t>(options_.num_local_ranks * rank_bytes),
                                      "the rows of a step");
    if (!block.ok()) return block.status();
    for (int32_t rank = 0; rank < options_.num_local_ranks; ++rank) {
      ranks.push_back(block->data() + rank * rank_bytes);
    }
    memory_blocks_.push_back(*std::move(block));
  }
  memories_ = std::make_unique<StepMemoryPool>(shape, parts);
  return absl::OkStatus();
}

RankWorker::Config CpuBackend::WorkerConfig(int32_t local_rank, int32_t max_tokens) const {
  const int32_t local = options_.num_local_ranks;
  RankWorker::Config config;
  config.rank = options_.first_rank + local_rank;
  config.local_rank = local_rank;
  config.num_threads = num_threads_ / local + (local_rank < num_threads_ % local ? 1 : 0);
  config.spin = spin_;
  config.limits = {options_.common.placement->num_ranks(), max_tokens};
  config.max_hidden_size = max_hidden_;
  config.max_intermediate_size = max_intermediate_;
  config.placement = options_.common.placement.get();
  config.weights = weights_.get();
  config.exchange = options_.exchange.get();
  return config;
}

absl::Status CpuBackend::CreateRanks() {
  ranks_ = std::vector<Rank>(options_.num_local_ranks);
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const RankWorker::Config config =
        WorkerConfig(static_cast<int32_t>(i), options_.common.max_tokens_per_rank);
    auto worker = RankWorker::Create(config);
    if (!worker.ok()) return worker.status();
    ranks_[i].worker = *std::move(worker);
    info_.devices.push_back(
        absl::StrCat(config.num_threads, " CPU thread", config.num_threads == 1 ? "" : "s"));
  }
  for (Rank& rank : ranks_) {
    rank.thread = std::thread([this, &rank] { RankLoop(rank); });
  }
  return absl::OkStatus();
}

void CpuBackend::FillInfo() {
  info_.name = "cpu";
  info_.num_ranks = options_.num_local_ranks;
  info_.max_tokens_per_rank = options_.common.max_tokens_per_rank;
  info_.weight_bytes = weights_->bytes();
  for (const Rank& rank : ranks_) info_.workspace_bytes += rank.worker->workspace_bytes();
  for (const MappedMemory& block : memory_blocks_) {
    info_.workspace_bytes += static_cast<int64_t>(block.size());
  }
  info_.detail = InstructionSet();
}

CpuBackend::~CpuBackend() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (Rank& rank : ranks_) {
    if (rank.thread.joinable()) rank.thread.join();
  }
}

absl::Status CpuBackend::ValidateBatch(const MoeStep& step, size_t rank) const {
  const RankBatch& batch = step.ranks[rank];
  if (batch.num_tokens < 0 || batch.num_tokens > options_.common.max_tokens_per_rank) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": got ", batch.num_tokens,
                                                   " tokens, the buffer is sized for ",
                                                   options_.common.max_tokens_per_rank));
  }
  if (batch.num_tokens == 0) return absl::OkStatus();
  if (batch.hidden == nullptr || batch.ids == nullptr || batch.weights == nullptr ||
      batch.row_in_request == nullptr || batch.output == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": a pointer is missing"));
  }
  const int32_t num_experts = options_.common.placement->num_experts();
  for (int32_t token = 0; token < batch.num_tokens; ++token) {
    if (batch.row_in_request[token] < 0) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": row_in_request of token ",
                                                     token, " is ", batch.row_in_request[token]));
    }
    for (int32_t k = 0; k < step.top_k; ++k) {
      const int32_t id = batch.ids[static_cast<size_t>(token) * step.top_k + k];
      if (id < -1 || id >= num_experts) {
        return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": id of token ", token,
                                                       ", choice ", k, " is ", id,
                                                       ", must be -1 or below ", num_experts));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CpuBackend::Validate(const MoeStep& step) const {
  if (!weights_->finished()) return absl::FailedPreconditionError("the weights are not loaded");
  if (weights_->LayerIndex(step.layer) < 0) {
    return absl::NotFoundError(absl::StrCat("layer ", step.layer, " is not served"));
  }
  if (step.top_k < 1 || step.top_k > limits::kMaxTopK) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", step.top_k, ", must be 1..", limits::kMaxTopK));
  }
  if (step.ranks.size() != ranks_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step has ", step.ranks.size(), " ranks, the process ", ranks_.size()));
  }
  for (size_t rank = 0; rank < step.ranks.size(); ++rank) {
    if (absl::Status status = ValidateBatch(step, rank); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CpuBackend::Submit(const MoeStep& step, Done done) {
  if (absl::Status status = Validate(step); !status.ok()) return status;
  auto run = std::make_shared<StepRun>();
  run->step = step;
  run->layer_index = weights_->LayerIndex(step.layer);
  run->done = std::move(done);
  run->ranks_left = static_cast<int32_t>(ranks_.size());
  run->limit.aborted = &aborted_;
  {
    std::lock_guard lock(mutex_);
    if (!abort_reason_.ok()) return abort_reason_;
    if (last_submitted_ && std::pair(step.generation, step.step) <= *last_submitted_) {
      return absl::InvalidArgumentError(
          absl::StrCat("step ", step.step, " of generation ", step.generation, " after step ",
                       last_submitted_->second, " of generation ", last_submitted_->first));
    }
    if (in_flight_ >= limits::kStepsInFlight) {
      return absl::ResourceExhaustedError(
          absl::StrCat(in_flight_, " steps are in flight, at most ", limits::kStepsInFlight));
    }
    ++in_flight_;
    last_submitted_ = std::pair(step.generation, step.step);
    for (Rank& rank : ranks_) rank.queue.push_back(run);
  }
  work_.notify_all();
  return absl::OkStatus();
}

void CpuBackend::AbortSteps(const absl::Status& reason) {
  EXPERTD_CHECK(!reason.ok());
  {
    std::lock_guard lock(mutex_);
    if (!abort_reason_.ok()) return;
    abort_reason_ = reason;
  }
  aborted_ = true;
  options_.exchange->Abort(reason);
}

// Idle is no fault: the wait for the next step has no deadline, the destructor ends it.
void CpuBackend::RankLoop(Rank& rank) {
  for (;;) {
    std::shared_ptr<StepRun> run;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [&] { return stop_ || !rank.queue.empty(); });
      if (rank.queue.empty()) return;
      run = std::move(rank.queue.front());
      rank.queue.pop_front();
    }
    RunOn(rank, *run);
  }
}

void CpuBackend::RunOn(Rank& rank, StepRun& run) {
  {
    std::lock_guard lock(run.mutex);
    if (!run.started) {  // the first rank to start sets the deadline of all
      run.started = true;
      run.start = absl::Now();
      run.limit.deadline = run.start + options_.common.step_timeout;
    }
  }
  const absl::Status status = rank.worker->Run(run.step, run.layer_index, run.limit);
  StepResult result;
  {
    std::lock_guard lock(run.mutex);
    if (run.status.ok()) run.status = status;
    if (--run.ranks_left > 0) return;
    result.status = run.status;
    result.timing.kernel_us = absl::ToInt64Microseconds(absl::Now() - run.start);
  }
  {
    std::lock_guard lock(mutex_);
    if (!result.status.ok() && !abort_reason_.ok()) result.status = abort_reason_;
    --in_flight_;
  }
  run.done(std::move(result));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const CpuBackendOptions& options) {
  try {
    return CpuBackend::Create(options);
  } catch (const std::system_error& error) {  // std::thread has no other way to say it
    return absl::ResourceExhaustedError(
        absl::StrCat("threads: the system gives no more: ", error.what()));
  }
}

}  // namespace expertd::cpu

namespace expertd {

absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const BackendOptions& options) {
  cpu::CpuBackendOptions cpu_options;
  cpu_options.common = options;
  return cpu::MakeCpuBackend(cpu_options);
}

}  // namespace expertd
