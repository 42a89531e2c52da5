#include "kernels/cuda/nccl_comm/device_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace expertd::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two ranks that nothing keeps apart.
std::vector<RankFacts> GoodFacts() {
  std::vector<RankFacts> facts(2);
  for (int rank = 0; rank < 2; ++rank) {
    CopyText(facts[rank].host, "node7/boot");
    CopyText(facts[rank].device, rank == 0 ? "0000:19:00.0 H200" : "0000:3b:00.0 H200");
    facts[rank].driver = 13000;
    facts[rank].nccl = 22809;
    facts[rank].vmm = 1;
  }
  return facts;
}

TEST(DeviceChecks, NothingSpeaksAgainstGoodFacts) { EXPECT_EQ(WhyNotMapped(GoodFacts()), ""); }

TEST(DeviceChecks, WhatARankLacksIsNamedWithItsDevice) {
  const std::string rank1 = "rank 1 (0000:3b:00.0 H200): ";
  auto facts = GoodFacts();
  facts[1].vmm = 0;
  EXPECT_EQ(WhyNotMapped(facts), rank1 + "the device has no virtual memory management");
  facts = GoodFacts();
  facts[1].driver = 11080;
  EXPECT_EQ(WhyNotMapped(facts), rank1 + "the driver supports CUDA 11.8, 12.0 is needed");
  facts = GoodFacts();
  facts[1].vmm_off = 1;
  EXPECT_EQ(WhyNotMapped(facts), rank1 + "NCCL_CUMEM_ENABLE=0 is set");
  facts = GoodFacts();
  facts[1].windows_off = 1;
  EXPECT_EQ(WhyNotMapped(facts), rank1 + "NCCL_WIN_ENABLE=0 is set");
}

TEST(DeviceChecks, DifferentHostsAreNamedWithBothDevices) {
  auto facts = GoodFacts();
  CopyText(facts[1].host, "node8/boot");
  EXPECT_THAT(WhyNotMapped(facts),
              AllOf(HasSubstr("rank 1 (0000:3b:00.0 H200) is on host node8/boot"),
                    HasSubstr("rank 0 (0000:19:00.0 H200) on host node7/boot")));
}

TEST(DeviceChecks, DifferentLibrariesAreNamed) {
  auto facts = GoodFacts();
  facts[1].nccl = 23203;
  EXPECT_THAT(WhyNotMapped(facts),
              AllOf(HasSubstr("loads NCCL 2.32.3"), HasSubstr("loads 2.28.9")));
}

TEST(DeviceChecks, APairWithoutPeerAccessIsNamed) {
  std::vector<RankVerdict> verdicts(2, MakeVerdict(absl::OkStatus()));
  verdicts[0] = MakeVerdict(
      absl::FailedPreconditionError(NoPeerAccess(GoodFacts(), 1, "CUDA says that it cannot")));
  EXPECT_EQ(FirstFailure(GoodFacts(), verdicts).message(),
            "rank 0 (0000:19:00.0 H200): cannot reach the memory of rank 1 (0000:3b:00.0 H200): "
            "CUDA says that it cannot");
}

TEST(DeviceChecks, LongTextsAreCutAndTerminated) {
  RankFacts facts;
  CopyText(facts.device, std::string(1000, 'x'));
  EXPECT_EQ(std::string(facts.device), std::string(sizeof(facts.device) - 1, 'x'));
}

TEST(DeviceChecks, AnOldNcclMustBeTheOneCompiledFor) {
  EXPECT_TRUE(CheckNcclVersion(22809, 22809).ok());
  for (const int loaded : {22803, 22907, 23203}) {
    const absl::Status status = CheckNcclVersion(22809, loaded);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("compiled for 2.28.9"));
  }
}

TEST(DeviceChecks, ANewNcclMayBeFollowedByLaterOnes) {
  EXPECT_TRUE(CheckNcclVersion(22902, 22902).ok());
  EXPECT_TRUE(CheckNcclVersion(22902, 23203).ok());
  EXPECT_FALSE(CheckNcclVersion(23203, 22902).ok());
}

TEST(DeviceChecks, TheLowestRankThatFailedSpeaksForAll) {
  std::vector<RankVerdict> verdicts(2, MakeVerdict(absl::OkStatus()));
  EXPECT_TRUE(FirstFailure(GoodFacts(), verdicts).ok());
  verdicts[1] = MakeVerdict(absl::ResourceExhaustedError("no memory"));
  const absl::Status status = FirstFailure(GoodFacts(), verdicts);
  EXPECT_EQ(status, absl::ResourceExhaustedError("rank 1 (0000:3b:00.0 H200): no memory"));
}

TEST(DeviceChecks, ValuesThatDifferAreNamed) {
  const std::vector<RankVerdict> same(3, MakeVerdict(absl::OkStatus(), 4096));
  EXPECT_TRUE(FirstDifference("window bytes", same).ok());
  auto verdicts = same;
  verdicts[2].value = 8192;
  EXPECT_EQ(FirstDifference("window bytes", verdicts),
            absl::InvalidArgumentError("window bytes: rank 2 has 8192, rank 0 has 4096"));
}

TEST(DeviceChecks, APatternThatIsLateOrWrongNamesItsWriter) {
  std::vector<SelfTestRecord> records(3);
  EXPECT_TRUE(JudgeSelfTest(records).ok());
  records[2] = {.num_wrong = 5, .first_offset = 4112, .found = 1, .expected = 0x2f};
  EXPECT_EQ(JudgeSelfTest(records),
            absl::InternalError("the pattern of rank 2: 5 words of 16 bytes are wrong, one at byte "
                                "4112 of the window: found 0x1, expected 0x2f"));
  records[1].timed_out = 1;
  EXPECT_EQ(JudgeSelfTest(records),
            absl::DeadlineExceededError("the pattern of rank 1 did not come in time"));
}

TEST(DeviceChecks, AddressesOfEqualStridesGiveAMap) {
  const std::vector<uint64_t> addresses = {0x1000, 0x9000, 0x11000};
  const auto map = AffinePeerMap(addresses, 2);
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->stride, 0x8000);
  EXPECT_EQ(map->rank, 2);
  EXPECT_EQ(map->num_ranks, 3);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(reinterpret_cast<uint64_t>(map->at<char>(r, 16)), addresses[r] + 16);
  }
}

TEST(DeviceChecks, OtherAddressesAreRefused) {
  for (const std::vector<uint64_t>& addresses :
       {std::vector<uint64_t>{0x1000, 0x9000, 0x11010}, {0x1000, 0, 0x11000}, {0x1008, 0x9008}}) {
    const auto map = AffinePeerMap(addresses, 0);
    EXPECT_EQ(map.status().code(), absl::StatusCode::kInternal);
  }
}

}  // namespace
}  // namespace expertd::cuda
