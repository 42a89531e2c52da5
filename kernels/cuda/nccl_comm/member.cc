#include "kernels/cuda/nccl_comm/member.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/limits.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/nccl_comm/device_probe.h"
#include "kernels/cuda/nccl_comm/nccl_status.h"
#include "kernels/cuda/nccl_comm/self_test.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

constexpr int kGatherChannels = 1;  // for records of a few hundred bytes
constexpr int64_t kFlagsAlignment = 256;
constexpr int64_t kMappingGranularity = 2 << 20;  // of device memory that peers map

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

WindowPlan PlanWindow(int64_t window_bytes, int32_t num_ranks) {
  WindowPlan plan;
  plan.window_bytes = window_bytes;
  plan.flags_offset = RoundUp(window_bytes, kFlagsAlignment);
  plan.memory_bytes =
      RoundUp(plan.flags_offset + SelfTestFlagBytes(num_ranks), kMappingGranularity);
  return plan;
}

Member::Member(const ncclUniqueId& id, int32_t rank, int32_t num_ranks,
               std::shared_ptr<StepName> step)
    : id_(id), rank_(rank), num_ranks_(num_ranks), step_(std::move(step)) {}

absl::Status Member::Prepare() {
  auto mine = ProbeThisRank();
  if (!mine.ok()) return mine.status();
  if (!alone()) {
    int loaded = 0;
    if (absl::Status s = NcclStatus(ncclGetVersion(&loaded), "ncclGetVersion"); !s.ok()) return s;
    if (absl::Status s = CheckNcclVersion(NCCL_VERSION_CODE, loaded); !s.ok()) return s;
    mine->nccl = loaded;
  }
  facts_ = {*mine};
  // Everything that may wait for a peer's kernel is done before any peer can have one running.
  const int64_t bytes = std::max({ScratchBytes<RankFacts>(), ScratchBytes<RankVerdict>(),
                                  ScratchBytes<SelfTestRecord>(), ScratchBytes<uint64_t>()});
  auto on_device = MemoryBlock::Allocate(MemoryKind::kDevice, bytes);
  if (!on_device.ok()) return on_device.status();
  device_scratch_ = *std::move(on_device);
  auto on_host = MemoryBlock::Allocate(MemoryKind::kPinned, bytes);
  if (!on_host.ok()) return on_host.status();
  host_scratch_ = *std::move(on_host);
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  if (absl::Status status = LoadWindowKernels(); !status.ok()) return status;
  return LoadSelfTestKernels();
}

absl::Status Member::Connect(absl::Time deadline) {
  if (absl::Status status = Prepare(); !status.ok()) return status;
  if (alone()) return absl::OkStatus();
  if (absl::Status status = Init(deadline); !status.ok()) return status;
  auto why = FindWhyNotMapped(deadline);
  if (!why.ok()) return why.status();
  why_not_mapped_ = *std::move(why);
  return absl::OkStatus();
}

absl::Status Member::Init(absl::Time deadline) {
  step_->Set("init");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // so that a peer that does not come leaves this rank free to give up
  config.maxCTAs = kGatherChannels;
  const ncclResult_t called = ncclCommInitRankConfig(&comm_, num_ranks_, id_, rank_, &config);
  if (comm_ == nullptr) return NcclStatus(called, "ncclCommInitRankConfig");
  if (absl::Status s = AwaitNccl(comm_, called, deadline, "ncclCommInitRankConfig"); !s.ok()) {
    return s;
  }
  step_->Set("exchange of facts");
  auto all = Gather(facts_[0], deadline);
  if (!all.ok()) return all.status();
  facts_ = *std::move(all);
  return absl::OkStatus();
}

// The same on all ranks: each condition is judged from what all ranks know.
absl::StatusOr<std::string> Member::FindWhyNotMapped(absl::Time deadline) {
  if (std::string why = WhyNotMapped(facts_); !why.empty()) return why;
  step_->Set("peer access");
  auto verdicts = Gather(MakeVerdict(CheckPeerAccess()), deadline);
  if (!verdicts.ok()) return verdicts.status();
  if (absl::Status failure = FirstFailure(facts_, *verdicts); !failure.ok()) {
    return std::string(failure.message());
  }
  return MakeDeviceCommunicator(deadline);
}

absl::Status Member::CheckPeerAccess() const {
  for (int32_t peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_) continue;
    if (const std::string why = WhyNoPeerAccess(facts_[rank_], facts_[peer]); !why.empty()) {
      return absl::FailedPreconditionError(NoPeerAccess(facts_, peer, why));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Member::MakeDeviceCommunicator(absl::Time deadline) {
  step_->Set("device communicator");
  device_communicator_ = std::make_unique<DeviceCommunicator>();
  const ncclResult_t called = device_communicator_->Create(comm_);
  absl::Status made = NcclStatus(called, "ncclDevCommCreate");
  const bool exists = made.ok();
  if (exists) {  // an error from here on is one of the communicator itself
    absl::Status status = AwaitNccl(comm_, called, deadline, "ncclDevCommCreate");
    if (!status.ok()) return status;
    if (device_communicator_->lsa_size() != num_ranks_ ||
        device_communicator_->lsa_rank() != rank_) {
      made = absl::FailedPreconditionError(absl::StrCat(
          "NCCL maps ", device_communicator_->lsa_size(), " of ", num_ranks_,
          " ranks into each other: it sees different hosts, or a pair without peer access"));
    }
  }
  auto verdicts = Gather(MakeVerdict(made), deadline);
  if (!verdicts.ok()) return verdicts.status();
  absl::Status failure = FirstFailure(facts_, *verdicts);
  if (failure.ok()) return std::string();
  if (exists) (void)device_communicator_->Destroy(comm_);
  device_communicator_.reset();
  return std::string(failure.message());
}

absl::Status Member::OpenWindow(int64_t bytes, absl::Time deadline) {
  plan_ = PlanWindow(bytes, num_ranks_);
  absl::Status allocated = AllocateWindow();
  if (alone()) {
    if (!allocated.ok()) return allocated;
    peers_ = PeerMap{own_memory_.as<char>(), 0, 0, 1};
    return AwaitStream(stream_, comm_, deadline);
  }
  if (allocated.ok()) allocated = AwaitStream(stream_, comm_, deadline);
  // A rank without memory must not leave the others waiting in the registration.
  auto verdicts = Gather(MakeVerdict(allocated, bytes), deadline);
  if (!verdicts.ok()) return verdicts.status();
  if (absl::Status failure = FirstFailure(facts_, *verdicts); !failure.ok()) return failure;
  if (absl::Status s = FirstDifference("window bytes", *verdicts); !s.ok()) return s;
  absl::Status mapped = MapWindow(deadline);
  if (absl::IsDeadlineExceeded(mapped) || IsFatal(mapped)) return mapped;
  return Agree(mapped, deadline);
}

// Zeroes it too, in stream order.
absl::Status Member::AllocateWindow() {
  void* memory = nullptr;
  if (alone()) {
    auto block = MemoryBlock::Allocate(MemoryKind::kDevice, plan_.memory_bytes);
    if (!block.ok()) return block.status();
    own_memory_ = *std::move(block);
    memory = own_memory_.data();
  } else {
    const ncclResult_t result = ncclMemAlloc(&nccl_memory_, plan_.memory_bytes);
    if (result != ncclSuccess) {
      nccl_memory_ = nullptr;
      size_t free_bytes = 0;
      size_t total_bytes = 0;
      (void)cudaMemGetInfo(&free_bytes, &total_bytes);
      return absl::ResourceExhaustedError(
          absl::StrCat("asked for ", plan_.memory_bytes, " bytes, ", free_bytes, " of ",
                       total_bytes, " are free: ", NcclStatus(result, "ncclMemAlloc").message()));
    }
    memory = nccl_memory_;
  }
  return EXPERTD_CUDA_STATUS(cudaMemsetAsync(memory, 0, plan_.memory_bytes, stream_));
}

absl::Status Member::MapWindow(absl::Time deadline) {
  const ncclResult_t called =
      ncclCommWindowRegister(comm_, nccl_memory_, plan_.memory_bytes, &window_, NCCL_WIN_DEFAULT);
  if (absl::Status s = AwaitNccl(comm_, called, deadline, "ncclCommWindowRegister"); !s.ok()) {
    return s;
  }
  if (window_ == nullptr) {  // preset to null: NCCL reports success where it has no windows
    return absl::FailedPreconditionError("ncclCommWindowRegister gave no window");
  }
  auto* addresses = device_scratch_.as<uint64_t>();
  if (absl::Status s = FetchPeerAddresses(window_, num_ranks_, addresses, stream_); !s.ok()) {
    return s;
  }
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(
      host_scratch_.data(), addresses, ScratchBytes<uint64_t>(), cudaMemcpyDeviceToHost, stream_));
  if (absl::Status status = AwaitStream(stream_, comm_, deadline); !status.ok()) return status;
  const auto* fetched = host_scratch_.as<const uint64_t>();
  auto map = AffinePeerMap({fetched, static_cast<size_t>(num_ranks_)}, rank_);
  if (map.ok()) peers_ = *map;
  return map.status();
}

absl::Status Member::SelfTest(cudaStream_t test_stream, absl::Time deadline) {
  SelfTestRun run;
  run.peers = peers_;
  run.window_bytes = plan_.window_bytes;
  run.flags_offset = plan_.flags_offset;
  run.round = ++self_test_round_;
  run.wait_ns = absl::ToInt64Nanoseconds(deadline - absl::Now());
  run.records = device_scratch_.as<SelfTestRecord>();
  if (absl::Status status = EnqueueSelfTest(run, test_stream); !status.ok()) return status;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(host_scratch_.data(), run.records,
                                               ScratchBytes<SelfTestRecord>(),
                                               cudaMemcpyDeviceToHost, test_stream));
  // The kernel ends at the deadline by its own clock.
  const absl::Duration grace = absl::Milliseconds(limits::kNcclGraceMs) / 2;
  if (absl::Status status = AwaitStream(test_stream, comm_, deadline + grace); !status.ok()) {
    return absl::IsDeadlineExceeded(status)
               ? MarkFatal(absl::DeadlineExceededError("its kernel does not end"))
               : status;
  }
  const auto* records = host_scratch_.as<const SelfTestRecord>();
  absl::Status judged = JudgeSelfTest({records, static_cast<size_t>(num_ranks_)});
  if (alone() || absl::IsDeadlineExceeded(judged)) return judged;
  return Agree(judged, deadline);
}

template <typename Record>
absl::StatusOr<std::vector<Record>> Member::Gather(const Record& mine, absl::Time deadline) {
  auto* on_host = host_scratch_.as<Record>();
  auto* on_device = device_scratch_.as<Record>();
  on_host[rank_] = mine;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(on_device + rank_, on_host + rank_, sizeof(Record),
                                               cudaMemcpyHostToDevice, stream_));
  const ncclResult_t called =
      ncclAllGather(on_device + rank_, on_device, sizeof(Record), ncclChar, comm_, stream_);
  if (absl::Status s = AwaitNccl(comm_, called, deadline, "ncclAllGather"); !s.ok()) return s;
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(on_host, on_device, ScratchBytes<Record>(), cudaMemcpyDeviceToHost, stream_));
  if (absl::Status status = AwaitStream(stream_, comm_, deadline); !status.ok()) return status;
  return std::vector<Record>(on_host, on_host + num_ranks_);
}

absl::Status Member::Agree(const absl::Status& mine, absl::Time deadline) {
  auto verdicts = Gather(MakeVerdict(mine), deadline);
  if (!verdicts.ok()) return verdicts.status();
  return FirstFailure(facts_, *verdicts);
}

absl::Status Member::Abort() {
  return NcclStatus(ncclCommAbort(std::exchange(comm_, nullptr)), "ncclCommAbort");
}

// Order: what hangs on the communicator, its memory, the communicator. An abort comes first, and
// frees what hangs on it.
void Member::TearDown(bool abort) {
  step_->Set("teardown");
  if (abort && comm_ != nullptr) Abort().IgnoreError();
  if (comm_ != nullptr) {
    if (device_communicator_ != nullptr) (void)device_communicator_->Destroy(comm_);
    if (window_ != nullptr) (void)ncclCommWindowDeregister(comm_, window_);
  }
  if (nccl_memory_ != nullptr) (void)ncclMemFree(nccl_memory_);
  if (comm_ != nullptr) (void)DestroyLocally(comm_);
  own_memory_.Free();
  device_scratch_.Free();
  host_scratch_.Free();
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

}  // namespace expertd::cuda
