#include "kernels/cuda/device_thread.h"

#include <sys/prctl.h>

#include <chrono>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/limits.h"
#include "kernels/cuda/check.h"
#include "kernels/fatal.h"

namespace expertd::cuda {
namespace {

// How long the thread sleeps between two looks at a running step: short beside the shortest step.
constexpr auto kPollInterval = std::chrono::microseconds(10);

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceThread>> DeviceThread::Start(
    int device, std::function<void()> on_overdue) {
  std::unique_ptr<DeviceThread> thread(new DeviceThread(std::move(on_overdue)));
  thread->thread_ = std::thread([t = thread.get(), device] { t->Loop(device); });
  if (absl::Status status = thread->Run([](cudaStream_t) { return absl::OkStatus(); });
      !status.ok()) {
    return status;
  }
  return thread;
}

DeviceThread::DeviceThread(std::function<void()> on_overdue) : on_overdue_(std::move(on_overdue)) {}

DeviceThread::~DeviceThread() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  posted_.notify_one();
  if (thread_.joinable()) thread_.join();
}

absl::Status DeviceThread::Run(Work work) {
  std::promise<absl::Status> result;
  Post([&](cudaStream_t stream) { return work(stream); }, absl::InfiniteDuration(),
       [&](absl::Status status) { result.set_value(std::move(status)); });
  return result.get_future().get();
}

void DeviceThread::Post(Work launch, absl::Duration limit, Done done) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back({std::move(launch), limit, std::move(done)});
  }
  posted_.notify_one();
}

absl::Status DeviceThread::health() const {
  std::lock_guard lock(mutex_);
  return health_;
}

absl::Status DeviceThread::SetUp(int device) {
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaSetDevice(device));
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  return absl::OkStatus();
}

void DeviceThread::Loop(int device) {
  prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; the default would stretch each poll to 60 us
  const absl::Status set_up = SetUp(device);
  std::unique_lock lock(mutex_);
  health_ = set_up;
  while (true) {
    if (!jobs_.empty()) {
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      StartJob(std::move(job));
      lock.lock();
    } else if (!running_.empty()) {
      lock.unlock();
      const bool finished = FinishOldest();
      lock.lock();
      if (!finished && jobs_.empty()) posted_.wait_for(lock, kPollInterval);
    } else if (stopping_) {
      break;
    } else {
      posted_.wait(lock, [this] { return !jobs_.empty() || stopping_; });
    }
  }
  lock.unlock();
  spare_events_.clear();
  if (stream_ != nullptr && health().ok()) (void)cudaStreamDestroy(stream_);
}

// A job that could not be started is answered after those before it, so that order is kept.
void DeviceThread::StartJob(Job job) {
  absl::Status status = health();
  Event end;
  if (status.ok()) status = Remember(Enqueue(job.launch, &end));
  if (!status.ok()) {
    while (!running_.empty()) {
      if (!FinishOldest()) std::this_thread::sleep_for(kPollInterval);
    }
    job.done(std::move(status));
    return;
  }
  const absl::Time now = absl::Now();
  // Jobs on one stream run one after the other: this one's time starts when its predecessor's ends.
  const absl::Time start = running_.empty() ? now : running_.back().overdue_at;
  running_.push_back(
      {.end = std::move(end),
       .overdue_at = start + job.limit,
       .hopeless_at = start + job.limit + absl::Milliseconds(limits::kCudaStopGraceMs),
       .limit = job.limit,
       .done = std::move(job.done)});
}

absl::Status DeviceThread::Enqueue(const Work& launch, Event* end) {
  if (spare_events_.empty()) {
    absl::StatusOr<Event> made = Event::Make();
    if (!made.ok()) return made.status();
    spare_events_.push_back(*std::move(made));
  }
  if (absl::Status status = launch(stream_); !status.ok()) return status;
  *end = std::move(spare_events_.back());
  spare_events_.pop_back();
  return EXPERTD_CUDA_STATUS(cudaEventRecord(end->get(), stream_));
}

bool DeviceThread::FinishOldest() {
  Running& oldest = running_.front();
  const cudaError_t error = cudaEventQuery(oldest.end.get());
  if (error == cudaErrorNotReady) {
    const absl::Time now = absl::Now();
    if (now < oldest.overdue_at) return false;
    if (!oldest.told_to_stop) on_overdue_();
    oldest.told_to_stop = true;
    if (now < oldest.hopeless_at) return false;
    FailRunning(MarkFatal(absl::InternalError(
        absl::StrCat("the GPU did not finish a step within ", absl::FormatDuration(oldest.limit),
                     " and did not stop when it was told to"))));
    return true;
  }
  // A kernel's fault shows up here, in whichever call comes next.
  if (absl::Status status = EXPERTD_CUDA_STATUS(error); !status.ok()) {
    FailRunning(MarkFatal(std::move(status)));
    return true;
  }
  Done done = std::move(oldest.done);
  spare_events_.push_back(std::move(oldest.end));
  running_.pop_front();
  done(absl::OkStatus());
  return true;
}

void DeviceThread::FailRunning(const absl::Status& status) {
  Remember(status).IgnoreError();
  std::deque<Running> failed = std::exchange(running_, {});
  for (Running& job : failed) job.done(status);
}

absl::Status DeviceThread::Remember(absl::Status status) {
  if (!IsFatal(status)) return status;
  std::lock_guard lock(mutex_);
  if (health_.ok()) health_ = status;
  return status;
}

}  // namespace expertd::cuda
