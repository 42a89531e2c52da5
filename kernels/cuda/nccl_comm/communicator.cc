#include "kernels/cuda/nccl_comm/communicator.h"

#include <cstdlib>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/check.h"
#include "config/limits.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/nccl_comm/member.h"
#include "kernels/cuda/nccl_comm/nccl_status.h"
#include "kernels/cuda/nccl_comm/watchdog.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

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

}  // namespace

// Owned by the communicator and by every thread that works for it. The caller's thread looks at the
// member only while no such thread runs: all of them are waited for, or `lost` is set.
class Communicator::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(const CommunicatorOptions& options, int device)
      : options(options),
        who(absl::StrCat("rank ", options.rank, " of ", options.num_ranks)),
        device(device),
        step(std::make_shared<StepName>()),
        member(options.id, options.rank, options.num_ranks, step) {}

  // Runs `work` of a collective call under the watchdog.
  using Work = std::function<absl::Status(Member*, absl::Time deadline)>;
  absl::Status Collective(const std::string& name, const Work& work);
  // Runs `work` on a thread of the watchdog, with the device current.
  absl::Status Local(const std::string& name, const std::function<absl::Status(Member*)>& work);

  const CommunicatorOptions options;
  const std::string who;
  const int device;
  const std::shared_ptr<StepName> step;
  Member member;
  bool failed = false;  // NCCL is aborted, not destroyed
  bool lost = false;    // a thread that was given up may still use everything here
};

absl::Status Communicator::Impl::Collective(const std::string& name, const Work& work) {
  EXPERTD_CHECK(!failed && !lost);
  step->Set(name);
  const absl::Time deadline = absl::Now() + options.limit;
  absl::Status status = RunWithin(
      options.limit + absl::Milliseconds(limits::kNcclGraceMs), who, step,
      [self = shared_from_this(), work, deadline]() -> absl::Status {
        EXPERTD_CUDA_RETURN_IF_ERROR(cudaSetDevice(self->device));
        absl::Status done = work(&self->member, deadline);
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

absl::Status Communicator::Impl::Local(const std::string& name,
                                       const std::function<absl::Status(Member*)>& work) {
  step->Set(name);
  return RunWithin(absl::Milliseconds(limits::kNcclTeardownMs), who, step,
                   [self = shared_from_this(), work]() -> absl::Status {
                     EXPERTD_CUDA_RETURN_IF_ERROR(cudaSetDevice(self->device));
                     return work(&self->member);
                   });
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
  int device = 0;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  auto impl = std::make_shared<Impl>(options, device);
  std::unique_ptr<Communicator> communicator(new Communicator(impl));
  absl::Status status = impl->Collective("device checks", [](Member* member, absl::Time deadline) {
    return member->Connect(deadline);
  });
  if (!status.ok()) return status;
  return communicator;
}

Communicator::Communicator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Communicator::~Communicator() {
  if (impl_->lost) {
    (void)new std::shared_ptr<Impl>(impl_);  // never freed: that thread may still use it
    return;
  }
  // If it does not end in time it is left behind and goes on; there is nobody to tell.
  impl_
      ->Local("teardown",
              [failed = impl_->failed](Member* member) {
                member->TearDown(failed);
                return absl::OkStatus();
              })
      .IgnoreError();
}

int32_t Communicator::rank() const { return impl_->options.rank; }
int32_t Communicator::num_ranks() const { return impl_->options.num_ranks; }
bool Communicator::mapped() const { return why_not_mapped().empty(); }
const std::string& Communicator::why_not_mapped() const { return impl_->member.why_not_mapped(); }
const PeerMap& Communicator::peers() const { return impl_->member.peers(); }
int64_t Communicator::window_bytes() const { return impl_->member.window_bytes(); }
ncclComm_t Communicator::nccl() const { return impl_->member.comm(); }

int64_t Communicator::MemoryBytes(int64_t window_bytes, int32_t num_ranks) {
  return PlanWindow(window_bytes, num_ranks).memory_bytes;
}

absl::Status Communicator::OpenWindow(int64_t bytes) {
  EXPERTD_CHECK(mapped() && peers().base == nullptr);
  const int64_t least = int64_t{16} * num_ranks();
  if (bytes < least) {
    return absl::InvalidArgumentError(
        absl::StrCat("window bytes: found ", bytes, ", expected at least ", least));
  }
  return impl_->Collective("window", [bytes](Member* member, absl::Time deadline) {
    return member->OpenWindow(bytes, deadline);
  });
}

absl::Status Communicator::SelfTest(cudaStream_t stream) {
  EXPERTD_CHECK(peers().base != nullptr);
  return impl_->Collective("self-test", [stream](Member* member, absl::Time deadline) {
    return member->SelfTest(stream, deadline);
  });
}

void Communicator::Abort() {
  impl_->failed = true;
  if (impl_->lost || nccl() == nullptr) return;
  const absl::Status status = impl_->Local("abort", [](Member* member) { return member->Abort(); });
  impl_->lost = IsFatal(status);
}

}  // namespace expertd::cuda
