#include "tests/gpu/testing/device_each_site.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "config/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/nccl_comm/communicator.h"

namespace expertd::testing {
namespace {

constexpr absl::Duration kFormingLimit = absl::Seconds(30);
// Of one piece of work; more than any kernel's wait limit in a test.
constexpr auto kPatience = std::chrono::seconds(120);

// A thread that runs one piece of work at a time for its device.
class RankThread {
 public:
  RankThread() : thread_([this] { Loop(); }) {}
  ~RankThread() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void Start(std::function<absl::Status()> work) {
    {
      std::lock_guard lock(mutex_);
      work_ = std::move(work);
    }
    changed_.notify_all();
  }

  absl::Status Wait() {
    std::unique_lock lock(mutex_);
    // Its memory and threads could not be taken down safely: the process ends.
    EXPERTD_CHECK(changed_.wait_for(lock, kPatience, [this] { return !work_; }));
    return std::move(result_);
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return work_ || stopping_; });
      if (!work_) return;
      lock.unlock();
      absl::Status result = work_();
      lock.lock();
      result_ = std::move(result);
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<absl::Status()> work_;  // guarded by mutex_; empty when it has run
  absl::Status result_;                 // guarded by mutex_
  bool stopping_ = false;               // guarded by mutex_
  std::thread thread_;
};

class DeviceEachSite : public RankSite {
 public:
  DeviceEachSite(int num_ranks, int64_t workspace_bytes)
      : RankSite(num_ranks, workspace_bytes), communicators_(num_ranks), threads_(num_ranks) {}

  ~DeviceEachSite() override {
    (void)ForEach([this](int rank, cudaStream_t stream) {
      communicators_[rank].reset();
      if (stream != nullptr) (void)cudaStreamDestroy(stream);
      return absl::OkStatus();
    });
  }

  absl::Status SetUp() {
    absl::StatusOr<ncclUniqueId> id = cuda::MakeCommunicatorId();
    if (!id.ok()) return id.status();
    absl::Status status = ForEach([&](int rank, cudaStream_t) { return SetUpRank(rank, *id); });
    if (!status.ok()) return status;
    return EXPERTD_CUDA_STATUS(
        cudaDeviceGetAttribute(&num_ctas_, cudaDevAttrMultiProcessorCount, 0));
  }

  absl::Status ForEach(const Work& work) override {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      threads_[rank].Start([this, &work, rank] { return work(rank, streams_[rank]); });
    }
    absl::Status first;
    for (RankThread& thread : threads_) first.Update(thread.Wait());
    return first;
  }

  absl::Status ForEachStep(int count, const StepWork& work) override {
    return ForEach([&](int rank, cudaStream_t stream) -> absl::Status {
      for (int index = 0; index < count; ++index) {
        if (absl::Status status = work(rank, index, stream); !status.ok()) return status;
      }
      return absl::OkStatus();
    });
  }

  cuda::Communicator* communicator(int rank) override { return communicators_[rank].get(); }

 private:
  absl::Status SetUpRank(int rank, const ncclUniqueId& id) {
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaSetDevice(rank));
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&streams_[rank], cudaStreamNonBlocking));
    auto communicator = cuda::Communicator::Create(
        {.id = id, .rank = rank, .num_ranks = num_ranks_, .limit = kFormingLimit});
    if (!communicator.ok()) return communicator.status();
    communicators_[rank] = *std::move(communicator);
    if (!communicators_[rank]->mapped()) {
      return absl::UnavailableError(
          absl::StrCat("the GPUs are not mapped: ", communicators_[rank]->why_not_mapped()));
    }
    if (absl::Status status = communicators_[rank]->OpenWindow(workspace_bytes_); !status.ok()) {
      return status;
    }
    peers_[rank] = communicators_[rank]->peers();
    return absl::OkStatus();
  }

  std::vector<std::unique_ptr<cuda::Communicator>> communicators_;  // each used on its thread
  std::vector<RankThread> threads_;                                 // rank r's device is r
};

}  // namespace

absl::StatusOr<std::unique_ptr<RankSite>> OpenDeviceEach(int num_ranks, int64_t workspace_bytes) {
  auto site = std::make_unique<DeviceEachSite>(num_ranks, workspace_bytes);
  if (absl::Status status = site->SetUp(); !status.ok()) return status;
  return site;
}

}  // namespace expertd::testing
