#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "config/cluster_spec.h"
#include "config/server_config.h"
#include "grpcpp/grpcpp.h"
#include "kernels/backend.h"
#include "loader/checkpoint.h"
#include "server/backend_choice.h"
#include "server/engine.h"
#include "server/health.h"
#include "server/metrics.h"
#include "server/model_service.h"
#include "server/self_test.h"
#include "server/service.h"
#include "server/serving_state.h"

namespace expertd {

// One expertd process: built in the order Open, Listen, StartLoading and taken down in reverse.
// Several may live in one process (tests). Its methods are called by one thread unless they say
// otherwise.
class App {
 public:
  // Reads the checkpoint's headers and places the experts. An error is the checkpoint's or the
  // placement's: exit_codes::kDataError.
  static absl::StatusOr<std::unique_ptr<App>> Open(const ServerConfig& config,
                                                   BackendFactory make_backend);
  ~App();  // Shutdown at once, if it was not called
  App(const App&) = delete;
  App& operator=(const App&) = delete;

  // Answers from here on; Forward with UNAVAILABLE "loading". Gives the bound address; an error is
  // exit_codes::kOsError.
  absl::StatusOr<std::string> Listen();

  // Makes the backend and loads the weights on a thread.
  void StartLoading();
  absl::Status WaitUntilServing(absl::Time deadline) const;  // any thread

  // NOT_SERVING from now on; does not block. Any thread.
  void BeginDrain() { state_.Drain(); }

  // Returns OK when draining began, or the reason why this process cannot serve (any more).
  absl::Status WaitUntilOver() const;  // any thread
  // exit_codes:: for a status of WaitUntilOver.
  static int ExitCode(const absl::Status& over);

  // NOT_SERVING; after the grace time new requests are refused; what is in flight ends until
  // `deadline`, then it is cancelled. Once; any thread.
  void Shutdown(absl::Time deadline);

  // For tests and logs.
  const Metrics& metrics() const { return metrics_; }
  const Engine& engine() const { return *engine_; }
  const ServingState& state() const { return state_; }

 private:
  App(const ServerConfig& config, BackendFactory make_backend, Checkpoint checkpoint,
      std::shared_ptr<const Placement> placement);

  absl::Status Load();
  v1::ServerInfo MakeInfo() const;
  int64_t MaxReceivedBytes() const;

  const ServerConfig config_;
  const BackendFactory make_backend_;
  const Checkpoint checkpoint_;
  const std::shared_ptr<const Placement> placement_;
  ServedModel model_;

  Metrics metrics_;
  HealthService health_;
  ServingState state_;  // tells health_
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<SelfTester> self_tester_;
  std::unique_ptr<ExpertServiceImpl> expert_service_;
  std::unique_ptr<ModelServiceImpl> model_service_;
  std::unique_ptr<grpc::Server> server_;
  std::atomic<bool> stop_loading_{false};
  std::thread loader_;
  std::once_flag shut_down_;
};

}  // namespace expertd
