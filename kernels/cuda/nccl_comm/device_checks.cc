#include "kernels/cuda/nccl_comm/device_checks.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace expertd::cuda {
namespace {

constexpr int32_t kMinDriver = 12000;  // from here on NCCL uses virtual memory management
constexpr int32_t kStableDeviceApi =
    22902;  // later libraries run device code compiled from here on
constexpr uint64_t kAddressAlignment = 16;

std::string VersionText(int32_t code) {
  return absl::StrCat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

std::string RankText(absl::Span<const RankFacts> facts, size_t rank) {
  return absl::StrCat("rank ", rank, " (", facts[rank].device, ")");
}

// What a rank lacks by itself.
std::string WhyNotThis(const RankFacts& facts) {
  if (facts.driver < kMinDriver) {
    return absl::StrCat("the driver supports CUDA ", facts.driver / 1000, ".",
                        facts.driver % 1000 / 10, ", 12.0 is needed");
  }
  if (facts.vmm == 0) return "the device has no virtual memory management";
  if (facts.vmm_off != 0) return "NCCL_CUMEM_ENABLE=0 is set";
  if (facts.windows_off != 0) return "NCCL_WIN_ENABLE=0 is set";
  return "";
}

}  // namespace

void CopyText(char* field, size_t field_bytes, std::string_view text) {
  const size_t bytes = std::min(field_bytes - 1, text.size());
  text.copy(field, bytes);  // text.data() may be null when it is empty
  std::memset(field + bytes, 0, field_bytes - bytes);
}

absl::Status CheckNcclVersion(int32_t compiled, int32_t loaded) {
  const bool usable = compiled >= kStableDeviceApi ? loaded >= compiled : loaded == compiled;
  if (usable) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "NCCL: this program was compiled for ", VersionText(compiled), " and needs ",
      compiled >= kStableDeviceApi ? "that or a later version" : "exactly that",
      "; the library found is ", VersionText(loaded), " (LD_LIBRARY_PATH decides which is found)"));
}

std::string WhyNotMapped(absl::Span<const RankFacts> facts) {
  for (size_t r = 0; r < facts.size(); ++r) {
    if (const std::string why = WhyNotThis(facts[r]); !why.empty()) {
      return absl::StrCat(RankText(facts, r), ": ", why);
    }
  }
  for (size_t r = 1; r < facts.size(); ++r) {
    if (facts[r].nccl != facts[0].nccl) {
      return absl::StrCat(RankText(facts, r), " loads NCCL ", VersionText(facts[r].nccl), ", ",
                          RankText(facts, 0), " loads ", VersionText(facts[0].nccl));
    }
  }
  for (size_t r = 1; r < facts.size(); ++r) {
    if (std::strcmp(facts[r].host, facts[0].host) != 0) {
      return absl::StrCat(RankText(facts, r), " is on host ", facts[r].host, ", ",
                          RankText(facts, 0), " on host ", facts[0].host,
                          " (hosts are told apart by NCCL_HOSTID, else by name and boot id)");
    }
  }
  return "";
}

std::string NoPeerAccess(absl::Span<const RankFacts> facts, int32_t peer, std::string_view found) {
  return absl::StrCat("cannot reach the memory of ", RankText(facts, peer), ": ", View(found));
}

RankVerdict MakeVerdict(const absl::Status& status, int64_t value) {
  RankVerdict verdict = {};
  verdict.value = value;
  verdict.code = static_cast<int32_t>(status.code());
  const absl::string_view text = status.message();
  CopyText(verdict.text, {text.data(), text.size()});
  return verdict;
}

absl::Status FirstFailure(absl::Span<const RankFacts> facts,
                          absl::Span<const RankVerdict> verdicts) {
  for (size_t r = 0; r < verdicts.size(); ++r) {
    if (verdicts[r].code == 0) continue;
    return absl::Status(static_cast<absl::StatusCode>(verdicts[r].code),
                        absl::StrCat(RankText(facts, r), ": ", verdicts[r].text));
  }
  return absl::OkStatus();
}

absl::Status FirstDifference(std::string_view what, absl::Span<const RankVerdict> verdicts) {
  for (size_t r = 1; r < verdicts.size(); ++r) {
    if (verdicts[r].value == verdicts[0].value) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        View(what), ": rank ", r, " has ", verdicts[r].value, ", rank 0 has ", verdicts[0].value));
  }
  return absl::OkStatus();
}

absl::Status JudgeSelfTest(absl::Span<const SelfTestRecord> records) {
  for (size_t writer = 0; writer < records.size(); ++writer) {
    const SelfTestRecord& record = records[writer];
    if (record.timed_out != 0) {
      return absl::DeadlineExceededError(
          absl::StrCat("the pattern of rank ", writer, " did not come in time"));
    }
    if (record.num_wrong == 0) continue;
    return absl::InternalError(absl::StrFormat(
        "the pattern of rank %d: %d words of 16 bytes are wrong, one at byte %d of the window: "
        "found %#x, expected %#x",
        writer, record.num_wrong, record.first_offset, record.found, record.expected));
  }
  return absl::OkStatus();
}

absl::StatusOr<PeerMap> AffinePeerMap(absl::Span<const uint64_t> addresses, int32_t rank) {
  PeerMap map;
  map.base = reinterpret_cast<char*>(addresses[0]);
  map.stride = addresses.size() > 1 ? static_cast<int64_t>(addresses[1] - addresses[0]) : 0;
  map.rank = rank;
  map.num_ranks = static_cast<int32_t>(addresses.size());
  for (size_t r = 0; r < addresses.size(); ++r) {
    const uint64_t expected = addresses[0] + r * static_cast<uint64_t>(map.stride);
    if (addresses[r] != expected || addresses[r] == 0 || addresses[r] % kAddressAlignment != 0) {
      return absl::InternalError(absl::StrFormat(
          "the window of rank %d is mapped at %#x, expected %#x (%d strides of %#x after rank 0's)",
          r, addresses[r], expected, r, map.stride));
    }
  }
  return map;
}

}  // namespace expertd::cuda
