#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/request.h"

namespace expertd {

// One queue's state, for the choice of the next step.
struct QueuedBatch {
  BatchKey key;
  int64_t rows = 0;
  absl::Time oldest;  // when its head was accepted
};

// Bounded first-in first-out queues of accepted calls, one a batch key. Passive: it starts nothing
// and answers nobody; what it removes is handed out for the caller to answer. Any thread.
class Batcher {
 public:
  struct Options {
    int32_t max_queued_requests = 0;  // all keys together
    int64_t max_inflight_bytes = 0;   // of calls not yet answered and sent
  };

  explicit Batcher(const Options& options);

  // RESOURCE_EXHAUSTED with a pushback when a bound is reached; the reason of Close after it. If
  // not OK the call was not taken and the caller answers it.
  absl::Status Add(const std::shared_ptr<Call>& call, absl::Time now);

  // Takes a queued call out; false if it is not queued (any more).
  bool Remove(const Call& call);

  // Whole requests from the head of one queue, staged, at most `max_rows` rows together; the first
  // that does not fit ends the batch.
  std::vector<std::shared_ptr<Call>> Take(const BatchKey& key, int64_t max_rows);

  // Removes what is past its deadline, respectively everything.
  std::vector<std::shared_ptr<Call>> TakeExpired(absl::Time now);
  std::vector<std::shared_ptr<Call>> TakeAll();

  // Add refuses with `reason` until Open.
  void Close(absl::Status reason);
  void Open();

  std::vector<QueuedBatch> Queued() const;
  absl::Time NextDeadline() const;  // absl::InfiniteFuture() if no queued call has one
  int64_t num_queued() const;
  int32_t num_waiting_streams() const;  // streams with a queued call
  int64_t inflight_bytes() const { return budget_->used(); }

 private:
  struct Queue {
    std::map<uint64_t, std::shared_ptr<Call>> calls;  // by ticket
    int64_t rows = 0;
  };

  void Erase(std::map<BatchKey, Queue>::iterator queue, const Call& call);  // needs mutex_

  const Options options_;
  const std::shared_ptr<ByteBudget> budget_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  absl::Status closed_;
  uint64_t next_ticket_ = 1;
  int64_t num_queued_ = 0;
  std::map<BatchKey, Queue> queues_;  // no empty ones
  std::map<std::pair<absl::Time, uint64_t>, BatchKey> deadlines_;
  std::map<const void*, int64_t> stream_calls_;  // queued ones of a stream; no zeros
};

}  // namespace expertd
