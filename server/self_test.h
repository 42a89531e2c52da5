#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "expertd/v1/expertd.pb.h"
#include "loader/checkpoint.h"
#include "server/engine.h"
#include "server/validate.h"

namespace expertd {

// Compares the real path with the reference in double, on experts read again from the checkpoint
// files: packing and placement are tested too. One test at a time, on a thread of its own.
class SelfTester {
 public:
  using Done = std::function<void(absl::StatusOr<v1::SelfTestResponse>)>;

  // All outlive it.
  SelfTester(const Checkpoint* checkpoint, const ServedModel* model, Engine* engine);
  ~SelfTester();  // ends a running test between two experts

  // `done` runs once, on the tester's thread, unless an error is returned here: RESOURCE_EXHAUSTED
  // while another test runs. `cancelled` is checked between experts.
  absl::Status Start(const v1::SelfTestRequest& request, absl::Time deadline,
                     std::shared_ptr<const std::atomic<bool>> cancelled, Done done);

 private:
  struct Job {
    v1::SelfTestRequest request;
    absl::Time deadline;
    std::shared_ptr<const std::atomic<bool>> cancelled;
    Done done;
  };

  void Run();
  absl::StatusOr<v1::SelfTestResponse> Test(const Job& job);
  absl::StatusOr<std::vector<double>> Reference(const Job& job, const LayerSpec& layer,
                                                const v1::ForwardRequest& input);
  absl::Status CheckGoingOn(const Job& job) const;

  const Checkpoint* const checkpoint_;
  const ServedModel* const model_;
  Engine* const engine_;
  std::atomic<bool> stopping_{false};

  std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_.
  std::unique_ptr<Job> waiting_;
  bool busy_ = false;

  std::thread thread_;
};

}  // namespace expertd
