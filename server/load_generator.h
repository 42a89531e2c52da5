#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "config/dtype.h"
#include "expertd/v1/expertd.pb.h"
#include "server/latency_histogram.h"

// The closed loop of `expertd bench`: each worker has its own connection and keeps its requests in
// flight, as an attention worker does. A failed request is counted, not retried.
namespace expertd {

enum class LoadMode { kUnary, kStream };

struct LoadOptions {
  std::string address;
  std::vector<v1::LayerInfo> layers;  // a worker goes through them in order, again and again
  int32_t tokens = 1;
  int32_t top_k = 0;  // 0 = the layer's own
  DType dtype = DType::kBf16;
  uint64_t seed = 0;
  int concurrency = 1;
  LoadMode mode = LoadMode::kUnary;
  int inflight = 1;          // of one worker; more than 1 needs kStream
  int64_t num_requests = 0;  // measured requests, all workers together; 0 = run for `duration`
  absl::Duration duration = absl::Seconds(5);
  absl::Duration warmup = absl::Milliseconds(500);  // sent, not measured
  absl::Duration timeout = absl::Seconds(10);       // of one request
};

// Sums over answered requests; divide by `count` for the mean.
struct TimingSums {
  uint64_t count = 0;
  uint64_t receive_us = 0;
  uint64_t queue_us = 0;
  uint64_t copy_in_us = 0;
  uint64_t kernel_us = 0;
  uint64_t copy_out_us = 0;
  uint64_t total_us = 0;
  uint64_t step_tokens = 0;

  void Add(const v1::Timing& timing);
  void Merge(const TimingSums& other);
};

struct LoadReport {
  LatencyHistogram latency;                // answered with OK; from before the send to the answer
  std::map<std::string, uint64_t> errors;  // by status code name
  std::string first_error;                 // an example, with its message
  TimingSums server;
  absl::Duration elapsed;  // the measured part
  bool stopped_early = false;

  uint64_t num_errors() const;
  void Merge(const LoadReport& other);
};

// Blocks until done. `*stop` may become true at any time (a signal handler): what is in flight is
// still awaited, at most `timeout`, and reported. An error only if a worker cannot connect at all.
absl::StatusOr<LoadReport> RunLoad(const LoadOptions& options, const std::atomic<bool>* stop);

}  // namespace expertd
