#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tests/gpu/testing/device.h"
#include "tests/gpu/testing/rank_group.h"

namespace expertd::testing {

// Which ranks a test runs on.
struct EpSite {
  RankMode mode;
  int num_ranks;
};
void PrintTo(const EpSite& site, std::ostream* out);
std::string EpSiteName(const ::testing::TestParamInfo<EpSite>& info);

// One GPU is enough for the first three; the others are skipped where GPUs are missing.
inline constexpr EpSite kEpSites[] = {{RankMode::kSameDevice, 2}, {RankMode::kSameDevice, 4},
                                      {RankMode::kSameDevice, 8}, {RankMode::kDeviceEach, 2},
                                      {RankMode::kDeviceEach, 4}, {RankMode::kDeviceEach, 8}};

// The reason why this machine cannot run such ranks, empty if it can. Asked once a site.
std::string WhyNot(const EpSite& site);

// As RankGroup::Make; a failure fails the test and gives null.
std::unique_ptr<RankGroup> MakeGroup(const EpSite& site, const HostLayer& layer,
                                     const Placement& placement, const RankGroup::Options& options);

// E experts in turn; with `spare` > 0 about so many slots more, that hold experts again.
Placement PlacementFor(int32_t num_experts, int num_ranks, int32_t spare_slots = 0);

// A test that runs on every site, or is skipped where the machine cannot.
class EpTest : public GpuTest, public ::testing::WithParamInterface<EpSite> {
 protected:
  void SetUp() override;
  int num_ranks() const { return GetParam().num_ranks; }
};

// All ranks' rows, one rank behind the other.
std::vector<uint8_t> Joined(const RankOutputs& outputs);

// How `max` tokens and fewer may lie on R ranks: none anywhere, on one, on all but one, uneven.
std::vector<std::vector<int32_t>> TokenMixes(int num_ranks, int32_t max);

}  // namespace expertd::testing
