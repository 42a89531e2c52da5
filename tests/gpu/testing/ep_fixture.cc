#include "tests/gpu/testing/ep_fixture.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/check.h"

namespace expertd::testing {

void PrintTo(const EpSite& site, std::ostream* out) {
  *out << RankModeName(site.mode) << site.num_ranks;
}

std::string EpSiteName(const ::testing::TestParamInfo<EpSite>& info) {
  return absl::StrCat(RankModeName(info.param.mode), info.param.num_ranks);
}

std::string WhyNot(const EpSite& site) {
  static std::map<std::pair<RankMode, int>, std::string> known;
  const auto key = std::pair(site.mode, site.num_ranks);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const absl::Status status = RankSite::Open(site.mode, site.num_ranks, 4096).status();
  // Anything but UNAVAILABLE is a defect, which MakeGroup reports.
  std::string reason(absl::IsUnavailable(status) ? status.message() : absl::string_view());
  return known[key] = std::move(reason);
}

std::unique_ptr<RankGroup> MakeGroup(const EpSite& site, const HostLayer& layer,
                                     const Placement& placement,
                                     const RankGroup::Options& options) {
  auto group = RankGroup::Make(site.mode, layer, placement, options);
  if (group.ok()) return *std::move(group);
  ADD_FAILURE() << group.status();
  return nullptr;
}

Placement PlacementFor(int32_t num_experts, int num_ranks, int32_t spare_slots) {
  const int32_t slots = (num_experts + spare_slots + num_ranks - 1) / num_ranks;
  auto placement = spare_slots == 0
                       ? Placement::Contiguous(num_experts, num_ranks)
                       : Placement::Redundant(num_experts, num_ranks, std::min(slots, num_experts));
  EXPERTD_CHECK(placement.ok());
  return *std::move(placement);
}

void EpTest::SetUp() {
  GpuTest::SetUp();
  if (IsSkipped()) return;
  const std::string reason = WhyNot(GetParam());
  if (!reason.empty()) GTEST_SKIP() << reason;
}

std::vector<uint8_t> Joined(const RankOutputs& outputs) {
  std::vector<uint8_t> all;
  for (const std::vector<uint8_t>& part : outputs) all.insert(all.end(), part.begin(), part.end());
  return all;
}

std::vector<std::vector<int32_t>> TokenMixes(int num_ranks, int32_t max) {
  const auto on_one = [&](int rank, int32_t tokens, int32_t elsewhere) {
    std::vector<int32_t> mix(num_ranks, elsewhere);
    mix[rank] = tokens;
    return mix;
  };
  const int last = num_ranks - 1;
  std::vector<std::vector<int32_t>> mixes = {std::vector<int32_t>(num_ranks, 0),
                                             std::vector<int32_t>(num_ranks, 1),
                                             on_one(0, 1, 0),
                                             on_one(last, 1, 0),
                                             on_one(0, max, 0),
                                             on_one(last, max, 0),
                                             on_one(0, 0, max),
                                             on_one(last, max, 1),
                                             std::vector<int32_t>(num_ranks, 8),
                                             std::vector<int32_t>(num_ranks, max)};
  const int32_t uneven[] = {7, 0, 65, 2, 33, 0, 64, 8};
  std::vector<int32_t> mix(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) mix[rank] = std::min(uneven[rank % 8], max);
  mixes.push_back(std::move(mix));
  return mixes;
}

}  // namespace expertd::testing
