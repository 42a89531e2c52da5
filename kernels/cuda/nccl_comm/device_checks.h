#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/comm/peer.h"

// What must hold for kernels to store into each other's memory, judged from facts that the ranks
// exchanged. Pure: no CUDA, no NCCL; every rank judges the same facts and says the same.
namespace expertd::cuda {

// What a rank knows of its device and process. Plain bytes: it travels through a collective.
struct RankFacts {
  char host[128];       // what NCCL tells hosts apart by: NCCL_HOSTID, else name and boot id
  char device[64];      // PCI bus id and name
  int32_t driver;       // CUDA version that the driver supports, e.g. 13000
  int32_t nccl;         // NCCL version code of the library that is loaded
  int32_t vmm;          // 1: the device supports virtual memory management
  int32_t windows_off;  // 1: NCCL_WIN_ENABLE=0 in the rank's environment
  int32_t vmm_off;      // 1: NCCL_CUMEM_ENABLE=0 likewise
  int32_t reserved;
};

// What a rank found in a step of the set-up; also exchanged.
struct RankVerdict {
  int64_t value;   // a number that must be the same on all ranks
  int32_t code;    // absl::StatusCode; 0: nothing failed
  char text[372];  // why
};

// What the pattern test of a window (self_test.h) found of one writer; zero before.
struct SelfTestRecord {
  uint64_t num_wrong;     // 16-byte words that differ
  uint64_t first_offset;  // of the first one found, in the window
  uint32_t found;         // there, of the 4 bytes that differ
  uint32_t expected;
  uint32_t timed_out;  // 1: the writer's flags did not come
  uint32_t reserved;
};

// Copies as much of `text` as fits, always terminated.
void CopyText(char* field, size_t field_bytes, std::string_view text);
template <size_t kBytes>
void CopyText(char (&field)[kBytes], std::string_view text) {
  CopyText(field, kBytes, text);
}

// Whether device code compiled against NCCL `compiled` may use a library `loaded` (version codes).
// Before 2.29.2 NCCL promises nothing beyond the same version.
absl::Status CheckNcclVersion(int32_t compiled, int32_t loaded);

// Empty if nothing in the facts (by rank) speaks against mapping; otherwise names the first
// condition that fails, with the rank, or both ranks and both devices.
std::string WhyNotMapped(absl::Span<const RankFacts> facts);

// What a rank says that cannot reach the memory of `peer`; `found`: who says so.
std::string NoPeerAccess(absl::Span<const RankFacts> facts, int32_t peer, std::string_view found);

RankVerdict MakeVerdict(const absl::Status& status, int64_t value = 0);

// OK if no rank failed; otherwise the status of the lowest one that did: "rank R (device): text".
absl::Status FirstFailure(absl::Span<const RankFacts> facts,
                          absl::Span<const RankVerdict> verdicts);

// OK if all values are the same; otherwise names `what` and two ranks that differ.
absl::Status FirstDifference(std::string_view what, absl::Span<const RankVerdict> verdicts);

// OK if all writers' patterns came; otherwise names the first writer whose did not: late is
// DEADLINE_EXCEEDED, wrong is INTERNAL.
absl::Status JudgeSelfTest(absl::Span<const SelfTestRecord> records);

// addresses[r]: where rank r's window is mapped here. INTERNAL if they are not an affine function
// of the rank, or not aligned for 16-byte accesses.
absl::StatusOr<PeerMap> AffinePeerMap(absl::Span<const uint64_t> addresses, int32_t rank);

}  // namespace expertd::cuda
