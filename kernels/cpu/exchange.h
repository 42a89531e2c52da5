#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace expertd {

enum class ExchangePhase : uint8_t { kDispatch = 0, kCombine = 1 };

// Names one all-to-all of the group. Every rank makes the same sequence of them, ascending.
struct ExchangeTag {
  uint64_t generation = 0;
  uint64_t step = 0;
  int32_t round = 0;  // a step larger than the workspace runs in several rounds
  ExchangePhase phase = ExchangePhase::kDispatch;

  auto operator<=>(const ExchangeTag&) const = default;
};

std::string DescribeTag(const ExchangeTag& tag);  // "step 7 round 0 dispatch"

// How the ranks of a group pass rows: an all-to-all of byte messages of any size. Inside a process
// memory is copied (MakeInProcessExchange); between processes an implementation over RPC is
// injected.
class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual int32_t num_ranks() const = 0;

  // Called by one thread of each rank for each tag. Sends send[d] to every rank d and receives the
  // message of every rank s into the front of receive[s], whose size on return is in
  // received_bytes[s]. All three have num_ranks entries; those of `rank` itself are not touched: a
  // rank keeps its own rows. Empty messages are normal. On return, whatever the status, neither the
  // sent nor the receive memory is used any more.
  // DEADLINE_EXCEEDED names the rank that waited, the rank it waited for and the tag; ABORTED if a
  // peer has gone on to a later tag; RESOURCE_EXHAUSTED if a message does not fit; the reason of
  // Abort.
  virtual absl::Status AllToAll(int32_t rank, const ExchangeTag& tag,
                                absl::Span<const absl::Span<const uint8_t>> send,
                                absl::Span<const absl::Span<uint8_t>> receive,
                                absl::Span<size_t> received_bytes, absl::Time deadline) = 0;

  // Any thread: whoever waits, now or later, ends with `reason`.
  virtual void Abort(const absl::Status& reason) = 0;
};

// All ranks are threads of this process.
std::shared_ptr<Exchange> MakeInProcessExchange(int32_t num_ranks);

}  // namespace expertd
