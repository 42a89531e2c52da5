#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "expertd/internal/v1/group.pb.h"
#include "server/request.h"

namespace expertd {

internal::v1::BatchKey ToProto(const BatchKey& key);
BatchKey FromProto(const internal::v1::BatchKey& key);

// Which step every rank of the group runs next, seen from one process. The engine reports what it
// has queued and what ended, takes the steps announced to it and launches each of them once, in
// order. Called by the engine's thread only; time is passed in. What several processes will
// exchange is in the messages already, so that the engine does not change when the leader is
// somewhere else.
class RankGroup {
 public:
  virtual ~RankGroup() = default;

  // Everything queued here; replaces the report before.
  virtual void Report(const internal::v1::Pending& pending, absl::Time now) = 0;
  // The next step to launch, if one is announced.
  virtual std::optional<internal::v1::Step> TakeStep(absl::Time now) = 0;
  // When TakeStep may give something that it does not give now, if nothing is reported until then.
  virtual absl::Time NextChange() const = 0;

  virtual void Report(const internal::v1::Done& done) = 0;
  // Closes the generation: no step is announced until Form.
  virtual void Report(const internal::v1::Fault& fault) = 0;
  // Set while the generation is closed.
  virtual const std::optional<internal::v1::Close>& closed() const = 0;
  // The next generation, its steps from 0. Only when closed and nothing launched is unfinished.
  virtual void Form() = 0;

  virtual uint64_t generation() const = 0;
};

// The group of one process: it is its own leader.
class LocalRankGroup final : public RankGroup {
 public:
  struct Options {
    uint64_t first_generation = 0;  // FirstGeneration(start time)
    // A step is announced when its oldest request waited this long, its rows fill a step, or every
    // open stream has a request queued: then nobody is left to wait for.
    absl::Duration batch_wait = absl::ZeroDuration();
    int64_t target_rows = 0;
  };

  // Never reused after a restart: seconds since 1970 << 16 | counter.
  static uint64_t FirstGeneration(absl::Time start);

  explicit LocalRankGroup(const Options& options)
      : options_(options), generation_(options.first_generation) {}

  void Report(const internal::v1::Pending& pending, absl::Time now) override;
  std::optional<internal::v1::Step> TakeStep(absl::Time now) override;
  absl::Time NextChange() const override;
  void Report(const internal::v1::Done& done) override;
  void Report(const internal::v1::Fault& fault) override;
  const std::optional<internal::v1::Close>& closed() const override { return closed_; }
  void Form() override;
  uint64_t generation() const override { return generation_; }

 private:
  struct Waiting {
    int64_t rows = 0;
    absl::Time oldest;
  };

  absl::Time EligibleAt(const Waiting& waiting) const;

  const Options options_;
  uint64_t generation_;
  uint64_t next_step_ = 0;  // announced are [0, next_step_)
  uint64_t done_ = 0;       // ended are [0, done_)
  std::map<BatchKey, Waiting> waiting_;
  bool all_streams_wait_ = false;
  std::optional<internal::v1::Close> closed_;
};

}  // namespace expertd
