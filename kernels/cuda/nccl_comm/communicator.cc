#include "kernels/cuda/nccl_comm/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/check.h"
#include "config/limits.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/nccl_comm/device_checks.h"
#include "kernels/cuda/nccl_comm/device_communicator.h"
#include "kernels/cuda/nccl_comm/device_probe.h"
#include "kernels/cuda/nccl_comm/nccl_status.h"
#include "kernels/cuda/nccl_comm/self_test.h"
#include "kernels/cuda/nccl_comm/watchdog.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

constexpr absl::Duration kPollEvery = absl::Microseconds(50);
constexpr int64_t kWindowAlignment = 256;
constexpr int64_t kWindowGranularity = 2 << 20;  // of device memory that can be mapped elsewhere

void SetEnvironment() {
  static const bool done = [] {
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    return true;
  }();
  (void)done;
}

absl::Status CheckOptions(const CommunicatorOptions& options) {
  if (options.num_ranks < 1 || options.num_ranks > limits::kMaxRanks) {
    return absl::InvalidArgumentError(absl::StrCat("num_ranks: found ", options.num_ranks,
                                                   ", expected 1 to ", limits::kMaxRanks));
  }
  if (options.rank < 0 || options.rank >= options.num_ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank: found ", options.rank, ", expected 0 to ", options.num_ranks - 1));
  }
  if (options.limit <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "limit: found ", absl::FormatDuration(options.limit), ", expected more than 0"));
  }
  return absl::OkStatus();
}

// From 2.31.2 on NCCL's destroy waits for the peers, which its abort never does.
ncclResult_t DestroyLocally(ncclComm_t comm) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 31, 2)
  return ncclCommAbort(comm);
#else
  return ncclCommDestroy(comm);
#endif
}

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

// The caller's thread reads and writes an Impl only while no thread of RunWithin does: all of them
// are waited for, or `lost` is set and nothing is touched again.
class Communicator::Impl : public std::enable_shared_from_this<Impl> {
 public:
  explicit Impl(const CommunicatorOptions& options)
      : options(options),
        who(absl::StrCat("rank ", options.rank, " of ", options.num_ranks)),
        step(std::make_shared<StepName>()) {}

  // Runs one collective call under the watchdog; `work` gets its deadline.
  absl::Status Guard(const std::string& name, std::function<absl::Status(Impl*, absl::Time)> work);
  void TearDown();
  void Abort();

  // The bodies of the collective calls; on a thread of RunWithin.
  absl::Status Connect(absl::Time deadline);
  absl::Status OpenWindow(int64_t bytes, absl::Time deadline);
  absl::Status SelfTest(cudaStream_t test_stream, absl::Time deadline);

  const CommunicatorOptions options;
  const std::string who;
  const std::shared_ptr<StepName> step;
  int device = 0;
  bool failed = false;  // NCCL is aborted, not destroyed
  bool lost = false;    // a thread may still use everything here

  std::string why_not_mapped;
  PeerMap peers;
  int64_t window_bytes = 0;
  ncclComm_t comm = nullptr;

 private:
  bool alone() const { return options.num_ranks == 1; }
  absl::Status Prepare();
  absl::Status Init(absl::Time deadline);
  absl::StatusOr<std::string> FindWhyNotMapped(absl::Time deadline);
  absl::Status CheckPeerAccess() const;
  absl::StatusOr<std::string> MakeDeviceCommunicator(absl::Time deadline);
  absl::Status AllocateWindow();
  absl::Status MapWindow(absl::Time deadline);
  absl::Status WaitFor(cudaStream_t waited, absl::Time deadline);
  // Every rank learns every rank's record.
  template <typename Record>
  absl::StatusOr<std::vector<Record>> Gather(const Record& mine, absl::Time deadline);
  absl::Status Agree(const absl::Status& mine, absl::Time deadline);

  template <typename Record>
  int64_t ScratchBytes() const {
    return options.num_ranks * static_cast<int64_t>(sizeof(Record));
  }

  std::vector<RankFacts> facts_;
  cudaStream_t stream_ = nullptr;
  MemoryBlock device_scratch_;
  MemoryBlock host_scratch_;
  std::unique_ptr<DeviceCommunicator> device_communicator_;
  MemoryBlock own_memory_;       // the window of one rank
  void* nccl_memory_ = nullptr;  // the window of several
  ncclWindow_t window_ = nullptr;
  int64_t flags_offset_ = 0;
  int64_t memory_bytes_ = 0;
  uint32_t self_test_round_ = 0;
};

absl::Status Communicator::Impl::Guard(const std::string& name,
                                       std::function<absl::Status(Impl*, absl::Time)> work) {
  EXPERTD_CHECK(!failed && !lost);
  step->Set(name);
  const absl::Time deadline = absl::Now() + options.limit;
  absl::Status status = RunWithin(
      options.limit + absl::Milliseconds(limits::kNcclGraceMs), who, step,
      [self = shared_from_this(), work = std::move(work), deadline]() -> absl::Status {
        EXPERTD_CUDA_RETURN_IF_ERROR(cudaSetDevice(self->device));
        absl::Status done = work(self.get(), deadline);
        if (done.ok()) return done;
        absl::Status named(done.code(), absl::StrCat(self->who, ": ", self->step->Get(), " (limit ",
                                                     absl::FormatDuration(self->options.limit),
                                                     "): ", done.message()));
        return IsFatal(done) ? MarkFatal(std::move(named)) : named;
      });
  failed = !status.ok();
  lost = IsFatal(status);
  return status;
}

absl::Status Communicator::Impl::Prepare() {
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

absl::Status Communicator::Impl::Connect(absl::Time deadline) {
  if (absl::Status status = Prepare(); !status.ok()) return status;
  if (alone()) return absl::OkStatus();
  if (absl::Status status = Init(deadline); !status.ok()) return status;
  auto why = FindWhyNotMapped(deadline);
  if (!why.ok()) return why.status();
  why_not_mapped = *std::move(why);
  return absl::OkStatus();
}

absl::Status Communicator::Impl::Init(absl::Time deadline) {
  step->Set("init");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // so that a peer that does not come leaves this rank free to give up
  const ncclResult_t called =
      ncclCommInitRankConfig(&comm, options.num_ranks, options.id, options.rank, &config);
  if (comm == nullptr) return NcclStatus(called, "ncclCommInitRankConfig");
  if (absl::Status s = AwaitNccl(comm, called, deadline, "ncclCommInitRankConfig"); !s.ok()) {
    return s;
  }
  step->Set("exchange of facts");
  auto all = Gather(facts_[0], deadline);
  if (!all.ok()) return all.status();
  facts_ = *std::move(all);
  return absl::OkStatus();
}

// The same on all ranks: each condition is judged from what all ranks know.
absl::StatusOr<std::string> Communicator::Impl::FindWhyNotMapped(absl::Time deadline) {
  if (std::string why = WhyNotMapped(facts_); !why.empty()) return why;
  step->Set("peer access");
  auto verdicts = Gather(MakeVerdict(CheckPeerAccess()), deadline);
  if (!verdicts.ok()) return verdicts.status();
  if (absl::Status failure = FirstFailure(facts_, *verdicts); !failure.ok()) {
    return std::string(failure.message());
  }
  return MakeDeviceCommunicator(deadline);
}

absl::Status Communicator::Impl::CheckPeerAccess() const {
  for (int32_t peer = 0; peer < options.num_ranks; ++peer) {
    if (peer == options.rank) continue;
    if (const std::string why = WhyNoPeerAccess(facts_[options.rank], facts_[peer]); !why.empty()) {
      return absl::FailedPreconditionError(NoPeerAccess(facts_, options.rank, peer, why));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Communicator::Impl::MakeDeviceCommunicator(absl::Time deadline) {
  step->Set("device communicator");
  device_communicator_ = std::make_unique<DeviceCommunicator>();
  const ncclResult_t called = device_communicator_->Create(comm);
  absl::Status made = NcclStatus(called, "ncclDevCommCreate");
  const bool exists = made.ok();
  if (exists) {  // an error from here on is one of the communicator itself
    absl::Status status = AwaitNccl(comm, called, deadline, "ncclDevCommCreate");
    if (!status.ok()) return status;
    if (device_communicator_->lsa_size() != options.num_ranks ||
        device_communicator_->lsa_rank() != options.rank) {
      made = absl::FailedPreconditionError(absl::StrCat(
          "NCCL maps ", device_communicator_->lsa_size(), " of ", options.num_ranks,
          " ranks into each other: it sees different hosts, or a pair without peer access"));
    }
  }
  auto verdicts = Gather(MakeVerdict(made), deadline);
  if (!verdicts.ok()) return verdicts.status();
  absl::Status failure = FirstFailure(facts_, *verdicts);
  if (failure.ok()) return std::string();
  if (exists) (void)device_communicator_->Destroy(comm);
  device_communicator_.reset();
  return std::string(failure.message());
}

absl::Status Communicator::Impl::OpenWindow(int64_t bytes, absl::Time deadline) {
  window_bytes = bytes;
  flags_offset_ = RoundUp(bytes, kWindowAlignment);
  memory_bytes_ = RoundUp(flags_offset_ + SelfTestFlagBytes(options.num_ranks), kWindowGranularity);
  absl::Status allocated = AllocateWindow();
  if (alone()) {
    if (!allocated.ok()) return allocated;
    peers = PeerMap{own_memory_.as<char>(), 0, 0, 1};
    return WaitFor(stream_, deadline);
  }
  if (allocated.ok()) allocated = WaitFor(stream_, deadline);
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
absl::Status Communicator::Impl::AllocateWindow() {
  void* memory = nullptr;
  if (alone()) {
    auto block = MemoryBlock::Allocate(MemoryKind::kDevice, memory_bytes_);
    if (!block.ok()) return block.status();
    own_memory_ = *std::move(block);
    memory = own_memory_.data();
  } else {
    const ncclResult_t result = ncclMemAlloc(&nccl_memory_, memory_bytes_);
    if (result != ncclSuccess) {
      nccl_memory_ = nullptr;
      size_t free_bytes = 0;
      size_t total_bytes = 0;
      (void)cudaMemGetInfo(&free_bytes, &total_bytes);
      return absl::ResourceExhaustedError(
          absl::StrCat("asked for ", memory_bytes_, " bytes, ", free_bytes, " of ", total_bytes,
                       " are free: ", NcclStatus(result, "ncclMemAlloc").message()));
    }
    memory = nccl_memory_;
  }
  return EXPERTD_CUDA_STATUS(cudaMemsetAsync(memory, 0, memory_bytes_, stream_));
}

absl::Status Communicator::Impl::MapWindow(absl::Time deadline) {
  const ncclResult_t called =
      ncclCommWindowRegister(comm, nccl_memory_, memory_bytes_, &window_, NCCL_WIN_DEFAULT);
  if (absl::Status s = AwaitNccl(comm, called, deadline, "ncclCommWindowRegister"); !s.ok()) {
    return s;
  }
  if (window_ == nullptr) {  // preset to null: NCCL reports success where it has no windows
    return absl::FailedPreconditionError("ncclCommWindowRegister gave no window");
  }
  auto* addresses = device_scratch_.as<uint64_t>();
  if (absl::Status s = FetchPeerAddresses(window_, options.num_ranks, addresses, stream_);
      !s.ok()) {
    return s;
  }
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(
      host_scratch_.data(), addresses, ScratchBytes<uint64_t>(), cudaMemcpyDeviceToHost, stream_));
  if (absl::Status status = WaitFor(stream_, deadline); !status.ok()) return status;
  const auto* fetched = host_scratch_.as<const uint64_t>();
  auto map = AffinePeerMap({fetched, static_cast<size_t>(options.num_ranks)}, options.rank);
  if (map.ok()) peers = *map;
  return map.status();
}

absl::Status Communicator::Impl::SelfTest(cudaStream_t test_stream, absl::Time deadline) {
  SelfTestRun run;
  run.peers = peers;
  run.window_bytes = window_bytes;
  run.flags_offset = flags_offset_;
  run.round = ++self_test_round_;
  run.wait_ns = absl::ToInt64Nanoseconds(deadline - absl::Now());
  run.records = device_scratch_.as<SelfTestRecord>();
  if (absl::Status status = EnqueueSelfTest(run, test_stream); !status.ok()) return status;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(host_scratch_.data(), run.records,
                                               ScratchBytes<SelfTestRecord>(),
                                               cudaMemcpyDeviceToHost, test_stream));
  // The kernel ends at the deadline by its own clock.
  const absl::Duration grace = absl::Milliseconds(limits::kNcclGraceMs) / 2;
  if (absl::Status status = WaitFor(test_stream, deadline + grace); !status.ok()) {
    return absl::IsDeadlineExceeded(status)
               ? MarkFatal(absl::DeadlineExceededError("its kernel does not end"))
               : status;
  }
  const auto* records = host_scratch_.as<const SelfTestRecord>();
  absl::Status judged = JudgeSelfTest({records, static_cast<size_t>(options.num_ranks)});
  if (alone() || absl::IsDeadlineExceeded(judged)) return judged;
  return Agree(judged, deadline);
}

absl::Status Communicator::Impl::WaitFor(cudaStream_t waited, absl::Time deadline) {
  while (true) {
    const cudaError_t state = cudaStreamQuery(waited);
    if (state != cudaErrorNotReady) {
      return EXPERTD_CUDA_STATUS(state);
    }
    if (comm != nullptr) {
      ncclResult_t result = ncclSuccess;
      (void)ncclCommGetAsyncError(comm, &result);
      if (absl::Status s = NcclStatus(result, "while waiting"); !s.ok()) return s;
    }
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError("a peer did not come in time");
    }
    absl::SleepFor(kPollEvery);
  }
}

template <typename Record>
absl::StatusOr<std::vector<Record>> Communicator::Impl::Gather(const Record& mine,
                                                               absl::Time deadline) {
  auto* on_host = host_scratch_.as<Record>();
  auto* on_device = device_scratch_.as<Record>();
  on_host[options.rank] = mine;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(on_device + options.rank, on_host + options.rank,
                                               sizeof(Record), cudaMemcpyHostToDevice, stream_));
  const ncclResult_t called =
      ncclAllGather(on_device + options.rank, on_device, sizeof(Record), ncclChar, comm, stream_);
  if (absl::Status s = AwaitNccl(comm, called, deadline, "ncclAllGather"); !s.ok()) return s;
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(on_host, on_device, ScratchBytes<Record>(), cudaMemcpyDeviceToHost, stream_));
  if (absl::Status status = WaitFor(stream_, deadline); !status.ok()) return status;
  return std::vector<Record>(on_host, on_host + options.num_ranks);
}

absl::Status Communicator::Impl::Agree(const absl::Status& mine, absl::Time deadline) {
  auto verdicts = Gather(MakeVerdict(mine), deadline);
  if (!verdicts.ok()) return verdicts.status();
  return FirstFailure(facts_, *verdicts);
}

void Communicator::Impl::Abort() {
  failed = true;
  if (lost || comm == nullptr) return;
  step->Set("abort");
  const absl::Status status =
      RunWithin(absl::Milliseconds(limits::kNcclTeardownMs), who, step,
                [self = shared_from_this()] { return NcclStatus(ncclCommAbort(self->comm), ""); });
  lost = IsFatal(status);
  comm = nullptr;
}

// Order: what hangs on the communicator, its memory, the communicator. After a failure abort comes
// first: it frees what hangs on it, and ends NCCL's kernels and threads that wait for a peer.
void Communicator::Impl::TearDown() {
  step->Set("teardown");
  if (cudaSetDevice(device) != cudaSuccess) return;
  if (failed && comm != nullptr) (void)ncclCommAbort(std::exchange(comm, nullptr));
  if (comm != nullptr) {
    if (device_communicator_ != nullptr) (void)device_communicator_->Destroy(comm);
    if (window_ != nullptr) (void)ncclCommWindowDeregister(comm, window_);
  }
  if (nccl_memory_ != nullptr) (void)ncclMemFree(nccl_memory_);
  if (comm != nullptr) (void)DestroyLocally(comm);
  own_memory_.Free();
  device_scratch_.Free();
  host_scratch_.Free();
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

absl::StatusOr<ncclUniqueId> MakeCommunicatorId() {
  SetEnvironment();
  ncclUniqueId id;
  if (absl::Status s = NcclStatus(ncclGetUniqueId(&id), "ncclGetUniqueId"); !s.ok()) return s;
  return id;
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Create(
    const CommunicatorOptions& options) {
  SetEnvironment();
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  auto impl = std::make_shared<Impl>(options);
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&impl->device));
  std::unique_ptr<Communicator> communicator(new Communicator(impl));
  absl::Status status = impl->Guard(
      "device checks", [](Impl* self, absl::Time deadline) { return self->Connect(deadline); });
  if (!status.ok()) return status;
  return communicator;
}

Communicator::Communicator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Communicator::~Communicator() {
  if (impl_->lost) {
    (void)new std::shared_ptr<Impl>(impl_);  // never freed: see Create's errors
    return;
  }
  // Ends or is left behind, holding what it frees; there is nobody to tell.
  (void)RunWithin(absl::Milliseconds(limits::kNcclTeardownMs), impl_->who, impl_->step,
                  [impl = impl_] {
                    impl->TearDown();
                    return absl::OkStatus();
                  });
}

int32_t Communicator::rank() const { return impl_->options.rank; }
int32_t Communicator::num_ranks() const { return impl_->options.num_ranks; }
bool Communicator::mapped() const { return impl_->why_not_mapped.empty(); }
const std::string& Communicator::why_not_mapped() const { return impl_->why_not_mapped; }
const PeerMap& Communicator::peers() const { return impl_->peers; }
int64_t Communicator::window_bytes() const { return impl_->window_bytes; }
ncclComm_t Communicator::nccl() const { return impl_->comm; }
void Communicator::Abort() { impl_->Abort(); }

absl::Status Communicator::OpenWindow(int64_t bytes) {
  EXPERTD_CHECK(mapped() && impl_->peers.base == nullptr);
  const int64_t least = int64_t{16} * num_ranks();
  if (bytes < least) {
    return absl::InvalidArgumentError(
        absl::StrCat("window bytes: found ", bytes, ", expected at least ", least));
  }
  return impl_->Guard("window", [bytes](Impl* impl, absl::Time deadline) {
    return impl->OpenWindow(bytes, deadline);
  });
}

absl::Status Communicator::SelfTest(cudaStream_t stream) {
  EXPERTD_CHECK(impl_->peers.base != nullptr);
  return impl_->Guard("self-test", [stream](Impl* impl, absl::Time deadline) {
    return impl->SelfTest(stream, deadline);
  });
}

}  // namespace expertd::cuda
