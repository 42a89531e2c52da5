#include "kernels/cuda/host_exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/check.h"
#include "config/limits.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/launch.h"
#include "kernels/cuda/nccl_transport.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

// A wait spins at first, since steps are short; then it leaves the core alone.
constexpr auto kSpinFor = std::chrono::microseconds(300);
constexpr auto kSleep = std::chrono::microseconds(10);
constexpr int kSpinsBetweenChecks = 64;

// Until `ready`; `check` says whether to give up.
template <typename Ready, typename Check>
absl::Status WaitUntil(Ready ready, Check check) {
  const auto start = std::chrono::steady_clock::now();
  for (int round = 1;; ++round) {
    const absl::StatusOr<bool> done = ready();
    if (!done.ok()) return done.status();
    if (*done) return absl::OkStatus();
    const bool spins = std::chrono::steady_clock::now() - start < kSpinFor;
    if (spins && round % kSpinsBetweenChecks != 0) continue;
    if (absl::Status status = check(); !status.ok()) return status;
    if (!spins) std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace

struct HostExchange::HostBlock {
  ExchangeNotice notice;
  uint32_t stop;
  moe_layer::FaultRecord fault;
};

int64_t HostExchange::DeviceBytes(const ExchangeShape& shape) { return ExchangeDeviceBytes(shape); }

absl::StatusOr<std::unique_ptr<HostExchange>> HostExchange::Create(
    const HostExchangeOptions& options) {
  absl::StatusOr<std::unique_ptr<NcclTransport>> transport =
      NcclTransport::Create(options.group, options.limit, nullptr);
  if (!transport.ok()) return transport.status();
  return Create(options, *std::move(transport));
}

absl::StatusOr<std::unique_ptr<HostExchange>> HostExchange::Create(
    const HostExchangeOptions& options, std::unique_ptr<RowTransport> transport) {
  if (absl::Status status = CheckExchangeShape(options.shape); !status.ok()) return status;
  EXPERTD_CHECK(transport->num_ranks() == options.shape.num_ranks);
  std::unique_ptr<HostExchange> exchange(new HostExchange(options, std::move(transport)));
  if (absl::Status status = exchange->Allocate(); !status.ok()) return status;
  EXPERTD_CUDA_RETURN_IF_ERROR(moe_layer::PrepareDevice());
  if (absl::Status status = LoadExchangeKernels(); !status.ok()) return status;
  return exchange;
}

HostExchange::HostExchange(const HostExchangeOptions& options,
                           std::unique_ptr<RowTransport> transport)
    : options_(options), transport_(std::move(transport)) {}

// What may still be written is not freed: it goes with the process.
HostExchange::~HostExchange() {
  if (!IsFatal(ended_)) return;
  static_cast<void>(new MemoryBlock(std::move(device_memory_)));
  static_cast<void>(new MemoryBlock(std::move(host_memory_)));
}

absl::Status HostExchange::Allocate() {
  const ExchangeShape& shape = options_.shape;
  const ExchangeLayout layout = PlanExchangeLayout(shape);
  workspace_ = layout::PlanWorkspace(LocalWorkspaceShape(shape));
  absl::StatusOr<MemoryBlock> device = MemoryBlock::Allocate(MemoryKind::kDevice, layout.bytes);
  if (!device.ok()) return device.status();
  device_memory_ = *std::move(device);
  absl::StatusOr<MemoryBlock> pinned =
      MemoryBlock::Allocate(MemoryKind::kPinned, sizeof(HostBlock));
  if (!pinned.ok()) return pinned.status();
  host_memory_ = *std::move(pinned);
  std::memset(host_memory_.data(), 0xff, sizeof(HostBlock));
  host()->stop = 0;
  host()->fault = {};
  absl::StatusOr<Event> passed = Event::Make();
  if (!passed.ok()) return passed.status();
  passed_ = *std::move(passed);

  // All ones: no header and no tag is of a step, and every record's slot is -1.
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemset(device_memory_.data(), 0xff, layout.workspace));
  buffers_ = BuffersOf(layout, device_memory_.data());
  std::vector<int32_t> identity(shape.slots_per_rank + 1);
  std::iota(identity.begin(), identity.end(), 0);
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpy(buffers_.first_slot, identity.data(), identity.size() * 4,
                                          cudaMemcpyHostToDevice));
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpy(buffers_.slots, identity.data(), shape.slots_per_rank * 4,
                                          cudaMemcpyHostToDevice));
  return EXPERTD_CUDA_STATUS(cudaStreamSynchronize(nullptr));
}

void HostExchange::Stop() {
  stopped_.store(true);
  std::atomic_ref(host()->stop).store(1);
}

absl::Status HostExchange::CheckStep(const LayerSpec& spec, const UnfusedStep& step) const {
  const ExchangeShape& shape = options_.shape;
  if (spec.hidden_size != shape.hidden_size || spec.intermediate_size != shape.intermediate_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layer ", spec.layer, ": found ", spec.hidden_size, " x ", spec.intermediate_size,
        ", expected ", shape.hidden_size, " x ", shape.intermediate_size));
  }
  if (step.num_tokens < 0 || step.num_tokens > shape.max_tokens_per_rank) {
    return absl::InvalidArgumentError(absl::StrCat(
        "got ", step.num_tokens, " tokens, the buffer is sized for ", shape.max_tokens_per_rank));
  }
  if (step.top_k < 1 || step.top_k > shape.max_top_k) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k: found ", step.top_k, ", expected 1 to ", shape.max_top_k));
  }
  return absl::OkStatus();
}

absl::Status HostExchange::Enqueue(const LayerSpec& spec, const PackedLayer& layer,
                                   const UnfusedStep& step, uint32_t step_number,
                                   cudaStream_t stream) {
  EXPERTD_CHECK(!in_step_);
  if (!ended_.ok()) return ended_;
  if (absl::Status status = CheckStep(spec, step); !status.ok()) return status;
  view_ = {.rank = transport_->rank(),
           .num_ranks = options_.shape.num_ranks,
           .slots_per_rank = options_.shape.slots_per_rank,
           .hidden_size = static_cast<int32_t>(options_.shape.hidden_size),
           .partials_bf16 = options_.shape.rounds_partials(),
           .step = step_number,
           .layer = spec.layer,
           .own = step,
           .placement = options_.placement,
           .buffers = buffers_,
           .notice = &static_cast<HostBlock*>(host_memory_.device_data())->notice};
  stream_ = stream;
  deadline_ = absl::Now() + options_.limit;
  host()->notice.step = ~step_number;
  plan_ = {};
  absl::Status status = CheckProgress();
  if (status.ok()) status = ExchangeCounts();
  if (status.ok()) status = WaitForCounts();
  if (status.ok()) status = ExchangeRows();
  if (status.ok()) status = RunExperts(spec, layer);
  if (status.ok()) status = ReturnPartials();
  if (status.ok()) status = EXPERTD_CUDA_STATUS(cudaEventRecord(passed_.get(), stream));
  in_step_ = status.ok();
  return status.ok() ? status : GiveUp(std::move(status));
}

absl::Status HostExchange::ExchangeCounts() {
  if (absl::Status status = LaunchFindOwners(view_, stream_); !status.ok()) return status;
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  for (int32_t peer = 0; peer < view_.num_ranks; ++peer) {
    if (peer == view_.rank) continue;
    sends.push_back({peer, buffers_.sent + peer, sizeof(ExchangeHeader)});
    receives.push_back({peer, buffers_.received + peer, sizeof(ExchangeHeader)});
  }
  absl::Status status = transport_->Exchange(sends, receives, stream_);
  return status.ok() ? LaunchPackRows(view_, stream_) : status;
}

absl::Status HostExchange::WaitForCounts() {
  const ExchangeNotice& notice = host()->notice;
  absl::Status status = WaitUntil(
      [&]() -> absl::StatusOr<bool> {
        // The rest of the notice was written before.
        return *static_cast<const volatile uint32_t*>(&notice.step) == view_.step;
      },
      [&] { return CheckProgress(); });
  if (!status.ok()) return status;
  std::atomic_thread_fence(std::memory_order_acquire);
  const auto sent = absl::MakeConstSpan(notice.sent, view_.num_ranks);
  const auto received = absl::MakeConstSpan(notice.received, view_.num_ranks);
  status = CheckHeaders(options_.shape, view_.rank, received);
  if (status.ok()) plan_ = PlanExchange(view_.rank, sent, received);
  return status;
}

absl::Status HostExchange::ExchangeRows() {
  const ExchangeNotice& notice = host()->notice;
  const int64_t row_bytes = options_.shape.hidden_size * 2;
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  for (int32_t peer = 0; peer < view_.num_ranks; ++peer) {
    if (peer == view_.rank) continue;
    const BlockBegin out = plan_.outgoing[peer];
    const BlockBegin in = plan_.incoming[peer];
    const ExchangeHeader& to = notice.sent[peer];
    const ExchangeHeader& from = notice.received[peer];
    sends.push_back(
        {peer, static_cast<char*>(buffers_.peer_rows) + out.row * row_bytes, to.rows * row_bytes});
    receives.push_back(
        {peer, reinterpret_cast<char*>(buffers_.rows) + in.row * row_bytes, from.rows * row_bytes});
    constexpr int64_t kRecordBytes = sizeof(RouteRecord);
    sends.push_back({peer, buffers_.peer_routes + out.record, RecordsOf(to) * kRecordBytes});
    receives.push_back({peer, buffers_.routes + in.record, RecordsOf(from) * kRecordBytes});
  }
  return transport_->Exchange(sends, receives, stream_);
}

absl::Status HostExchange::RunExperts(const LayerSpec& spec, const PackedLayer& layer) {
  if (plan_.rows == 0) return LaunchSealPartials(view_, nullptr, stream_);
  absl::Status status = LaunchSpreadRoutes(view_, plan_.rows, plan_.top_k, stream_);
  if (!status.ok()) return status;
  if (needs_reset_ || kernel_step_ == std::numeric_limits<uint32_t>::max()) {
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(buffers_.workspace, 0, workspace_.bytes, stream_));
    kernel_step_ = 0;
    needs_reset_ = false;
  }
  ++kernel_step_;
  host()->fault = {};
  const LayerShape shape = {.format = FormatOf(spec.recipe),
                            .hidden = spec.hidden_size,
                            .intermediate = spec.intermediate_size,
                            .num_experts = spec.num_experts,
                            .num_slots = view_.slots_per_rank};
  // The mean load of a slot follows from all ranks' tokens.
  const int64_t tokens = std::min<int64_t>(plan_.group_tokens, limits::kMaxTokensPerRank);
  const absl::StatusOr<KernelConfig> config =
      ChooseKernelConfig(shape, static_cast<int32_t>(tokens), plan_.top_k, options_.num_sms);
  if (!config.ok()) return config.status();
  const moe_layer::MoeLayerParams params = LayerParams(spec, layer);
  EXPERTD_CUDA_RETURN_IF_ERROR(moe_layer::Launch(shape.format, *config, params, stream_));
  return LaunchSealPartials(view_, &params.fault->code, stream_);
}

// A launch of the layer kernel that knows of no other rank: rows of all ranks, local slots as
// experts, the weighted sums of this rank's routes as output.
moe_layer::MoeLayerParams HostExchange::LayerParams(const LayerSpec& spec,
                                                    const PackedLayer& layer) const {
  auto* device_host = static_cast<HostBlock*>(host_memory_.device_data());
  moe_layer::MoeLayerParams params;
  params.num_tokens = static_cast<int32_t>(plan_.rows);
  params.top_k = plan_.top_k;
  params.hidden = view_.hidden_size;
  params.intermediate = static_cast<int32_t>(spec.intermediate_size);
  params.num_experts = params.num_slots = params.slots_per_rank = view_.slots_per_rank;
  params.x = buffers_.rows;
  params.ids = buffers_.ids;
  params.weights = buffers_.weights;
  params.output = buffers_.partials;
  params.output_f32 = !view_.partials_bf16;
  params.step = kernel_step_;
  params.first_slot = buffers_.first_slot;
  params.slots = buffers_.slots;
  params.fc1_units = layer.fc1_units;
  params.fc2_units = layer.fc2_units;
  params.fc1_factors = layer.fc1_factors;
  params.fc2_factors = layer.fc2_factors;
  params.swiglu_limit = spec.swiglu_limit;
  params.peers.base = buffers_.workspace;
  params.workspace = workspace_;
  params.stop = &device_host->stop;
  params.fault = &device_host->fault;
  params.timeout_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(options_.limit / 2));
  params.stall = stall_;
  return params;
}

absl::Status HostExchange::ReturnPartials() {
  const ExchangeNotice& notice = host()->notice;
  const int64_t row_bytes = options_.shape.partial_row_bytes();
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  for (int32_t peer = 0; peer < view_.num_ranks; ++peer) {
    if (peer == view_.rank) continue;
    sends.push_back({peer,
                     static_cast<char*>(buffers_.partials) + plan_.incoming[peer].row * row_bytes,
                     notice.received[peer].rows * row_bytes});
    receives.push_back(
        {peer, static_cast<char*>(buffers_.peer_rows) + plan_.outgoing[peer].row * row_bytes,
         notice.sent[peer].rows * row_bytes});
    sends.push_back({peer, buffers_.tag, sizeof(ExchangeTag)});
    receives.push_back({peer, buffers_.peer_tags + peer, sizeof(ExchangeTag)});
  }
  absl::Status status = transport_->Exchange(sends, receives, stream_);
  return status.ok() ? LaunchSumPartials(view_, stream_) : status;
}

absl::Status HostExchange::Finish() {
  EXPERTD_CHECK(in_step_);
  in_step_ = false;
  absl::Status status = WaitUntil(
      [&]() -> absl::StatusOr<bool> {
        const cudaError_t state = cudaEventQuery(passed_.get());
        if (state == cudaErrorNotReady) return false;
        if (absl::Status failed = EXPERTD_CUDA_STATUS(state); !failed.ok()) return failed;
        return true;
      },
      [&] { return CheckProgress(); });
  if (!status.ok()) return GiveUp(std::move(status));
  return CheckFaults();
}

std::string HostExchange::StepName() const {
  return absl::StrCat("step ", view_.step, " layer ", view_.layer);
}

// The step has passed everywhere it had to: did every layer kernel complete.
absl::Status HostExchange::CheckFaults() {
  const HostBlock& block = *host();
  if (plan_.rows > 0 && block.fault.code != moe_layer::kNoFault) {
    needs_reset_ = true;
    return absl::DeadlineExceededError(absl::StrCat(
        StepName(), ": rank ", view_.rank, " gave up in its layer kernel: fault ", block.fault.code,
        ", tile ", block.fault.tile, ", found ", block.fault.found, ", expected ",
        block.fault.expected, ", waited ", block.fault.waited_us, " us"));
  }
  for (int32_t peer = 0; peer < view_.num_ranks; ++peer) {
    if (peer == view_.rank) continue;
    const ExchangeTag& tag = block.notice.tags[peer];
    if (tag.step != view_.step) {
      return absl::InternalError(
          absl::StrCat(StepName(), ": the partial rows of rank ", peer, " are of step ", tag.step));
    }
    if (tag.fault == moe_layer::kNoFault) continue;
    return absl::UnavailableError(absl::StrCat(StepName(), ": rank ", peer,
                                               " gave up in its layer kernel: fault ", tag.fault));
  }
  return absl::OkStatus();
}

// While a wait goes on: is there a reason to give up.
absl::Status HostExchange::CheckProgress() {
  if (stopped_.load()) return absl::UnavailableError("it was told to stop");
  if (absl::Status status = transport_->Check(); !status.ok()) return status;
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state != cudaSuccess && state != cudaErrorNotReady) return EXPERTD_CUDA_STATUS(state);
  if (absl::Now() < deadline_) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("no answer within ", absl::FormatDuration(options_.limit)));
}

// Everything ends: the layer kernel by its stop word, NCCL's kernels by the abort. Who never
// answered is read from device memory when nothing writes to it any more.
absl::Status HostExchange::GiveUp(absl::Status reason) {
  std::atomic_ref(host()->stop).store(1);
  absl::Status ended = transport_->Abort();
  if (ended.ok()) ended = Drain();
  const std::string who = ended.ok() ? WhoIsMissing() : std::string();
  const absl::Status& cause = ended.ok() ? reason : ended;
  ended_ = absl::Status(cause.code(),
                        absl::StrCat(StepName(), ": rank ", view_.rank, ": ", reason.message(),
                                     who.empty() ? "" : absl::StrCat("; missing: ", who),
                                     ended.ok() ? "" : absl::StrCat("; ", ended.message())));
  if (IsFatal(cause) || IsFatal(reason)) ended_ = MarkFatal(ended_);
  return ended_;
}

absl::Status HostExchange::Drain() {
  const absl::Time until = absl::Now() + absl::Milliseconds(limits::kCudaStopGraceMs);
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state != cudaErrorNotReady) {
      absl::Status status = EXPERTD_CUDA_STATUS(state);
      return status.ok() ? status : MarkFatal(std::move(status));
    }
    if (absl::Now() >= until) {
      return MarkFatal(absl::InternalError("the stream did not end after the abort"));
    }
    std::this_thread::sleep_for(kSleep);
  }
}

std::string HostExchange::WhoIsMissing() const {
  const int32_t ranks = view_.num_ranks;
  std::vector<ExchangeHeader> headers(ranks);
  std::vector<ExchangeTag> tags(ranks);
  const auto download = [](const void* from, void* to, size_t bytes) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
  };
  if (!download(buffers_.received, headers.data(), ranks * sizeof(ExchangeHeader))) return "";
  for (int32_t q = 0; q < ranks; ++q) tags[q].step = headers[q].step;
  std::string who = RanksMissing(view_.rank, view_.step, tags);
  if (!who.empty()) return absl::StrCat("counts of ", who);
  if (plan_.incoming.empty()) return "";
  for (int32_t q = 0; q < ranks; ++q) {
    if (q == view_.rank) continue;
    const int64_t last = plan_.incoming[q].record + RecordsOf(headers[q]) - 1;
    if (!download(buffers_.routes + last, &tags[q], sizeof(ExchangeTag))) return "";
    if (tags[q].fault != kRoutesTag) tags[q].step = ~view_.step;
  }
  who = RanksMissing(view_.rank, view_.step, tags);
  if (!who.empty()) return absl::StrCat("rows of ", who);
  if (!download(buffers_.peer_tags, tags.data(), ranks * sizeof(ExchangeTag))) return "";
  who = RanksMissing(view_.rank, view_.step, tags);
  return who.empty() ? "" : absl::StrCat("partial rows of ", who);
}

}  // namespace expertd::cuda
