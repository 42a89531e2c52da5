#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tests/gpu/testing/ep_fixture.h"
#include "tests/gpu/testing/moe_cases.h"

// One rank fails at one point of a step: every kernel ends within its limit, whoever waited says
// for whom and for what, and after the workspaces are as new the next step is right.
namespace expertd {
namespace {

using cuda::moe_layer::FaultRecord;
using cuda::moe_layer::StallPoint;
using testing::EpSite;
using testing::HostBatch;
using testing::HostLayer;
using testing::RankBatches;
using testing::RankGroup;
using testing::RankOutputs;

constexpr absl::Duration kTimeout = absl::Milliseconds(200);
constexpr absl::Duration kMargin = absl::Milliseconds(300);

// One stalled role. What the other ranks and the stalled one itself say; a code of kNoFault: may
// have a record or none.
struct Stall {
  const char* name;
  StallPoint point;
  uint32_t others_code;
  uint32_t own_code;
};
const Stall kStalls[] = {
    {"Routes", cuda::moe_layer::kStallRoutes, cuda::moe_layer::kWaitRoutes, 0},
    {"Records", cuda::moe_layer::kStallRecords, cuda::moe_layer::kWaitRoutes, 0},
    {"Tokens", cuda::moe_layer::kStallTokens, cuda::moe_layer::kWaitTokens,
     cuda::moe_layer::kWaitTokens},
    {"Fc1", cuda::moe_layer::kStallFc1, cuda::moe_layer::kWaitPartials, cuda::moe_layer::kWaitFc1},
    {"Fc2", cuda::moe_layer::kStallFc2, cuda::moe_layer::kWaitPartials, cuda::moe_layer::kWaitFc2},
    {"Partials", cuda::moe_layer::kStallPartials, cuda::moe_layer::kWaitPartials, 0},
    {"Count", cuda::moe_layer::kStallCount, cuda::moe_layer::kWaitPartials,
     cuda::moe_layer::kWaitSort},
    {"Place", cuda::moe_layer::kStallPlace, cuda::moe_layer::kWaitPartials,
     cuda::moe_layer::kWaitSort}};
void PrintTo(const Stall& stall, std::ostream* out) { *out << stall.name; }

constexpr int32_t kExperts = 16;
constexpr int32_t kTopK = 4;
constexpr int32_t kTokens = 16;
// More tiles of each phase than CTAs: none is left over that waits for what follows from the stall
// (an FC2 tile, combine) as early as others wait for the cause.
constexpr int64_t kHidden = 4096;
constexpr int64_t kIntermediate = 2048;

// Routes of four tokens cover all experts, so that every rank needs every other one.
HostBatch EveryoneNeedsEveryone(const LayerSpec& spec, int32_t tokens, uint64_t seed) {
  HostBatch batch = testing::MakeRandomBatch(spec, tokens, kTopK, testing::Routing::kUniform, seed);
  std::iota(batch.ids.begin(), batch.ids.end(), 0);
  for (int32_t& id : batch.ids) id %= kExperts;
  return batch;
}

// Layer, ranks and a step whose answer is known.
struct Scene {
  explicit Scene(const EpSite& site, int32_t own_sort_routes = layout::kOwnSortRoutes)
      : host(testing::MakeRandomLayer({.hidden_size = kHidden,
                                       .intermediate_size = kIntermediate,
                                       .num_experts = kExperts,
                                       .top_k = kTopK},
                                      81)),
        group(testing::MakeGroup(
            site, host, testing::PlacementFor(kExperts, site.num_ranks),
            {.max_tokens = kTokens, .max_top_k = kTopK, .own_sort_routes = own_sort_routes})) {
    for (int rank = 0; rank < site.num_ranks; ++rank) {
      batches.push_back(EveryoneNeedsEveryone(host.spec, kTokens, 82 + rank));
    }
    if (group == nullptr) return;
    answer = group->Run(batches);
    group->Run(batches);  // both buffers hold rows and flags of earlier steps
  }

  void ExpectTheNextStepIsRight() {
    const RankOutputs after = group->Run(batches);
    for (size_t rank = 0; rank < after.size(); ++rank) {
      EXPECT_EQ(testing::FirstDifference(after[rank], answer[rank]), -1) << "rank " << rank;
    }
  }

  HostLayer host;
  std::unique_ptr<RankGroup> group;
  RankBatches batches;
  RankOutputs answer;
};

void ExpectRecord(const FaultRecord& record, uint32_t code, int peer, uint32_t step) {
  EXPECT_EQ(record.code, code);
  EXPECT_EQ(record.peer, static_cast<uint32_t>(peer));
  EXPECT_EQ(record.step, step);
  EXPECT_EQ(record.expected, step);
  EXPECT_LT(record.found, step);
  EXPECT_EQ(record.complete, 1u);
  const absl::Duration waited = absl::Microseconds(record.waited_us);
  EXPECT_GE(waited, kTimeout);
  EXPECT_LT(waited, kTimeout + kMargin);
}

class EpMoeStallTest : public testing::GpuTest,
                       public ::testing::WithParamInterface<std::tuple<Stall, EpSite>> {
 protected:
  void SetUp() override {
    testing::GpuTest::SetUp();
    if (IsSkipped()) return;
    const std::string reason = testing::WhyNot(std::get<1>(GetParam()));
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, EpMoeStallTest,
                         ::testing::Combine(::testing::ValuesIn(kStalls),
                                            ::testing::ValuesIn(testing::kEpSites)),
                         [](const auto& info) {
                           const EpSite& site = std::get<1>(info.param);
                           return absl::StrCat(std::get<0>(info.param).name, "_",
                                               testing::RankModeName(site.mode), site.num_ranks);
                         });

TEST_P(EpMoeStallTest, OfOneRankEndsEveryKernelWithARecordAndTheNextStepIsRight) {
  const auto& [stall, site] = GetParam();
  Scene scene(site, stall.own_code == cuda::moe_layer::kWaitSort ? -1 : layout::kOwnSortRoutes);
  ASSERT_NE(scene.group, nullptr);
  for (const int stalled : {0, site.num_ranks - 1}) {
    const RankGroup::Disturbed result = scene.group->RunDisturbed(
        scene.batches, {.stalled_rank = stalled, .stall = stall.point, .timeout = kTimeout});
    for (int rank = 0; rank < site.num_ranks; ++rank) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, ", stalled ", stalled));
      EXPECT_LT(result.ended[rank], kTimeout + kMargin);
      const FaultRecord& record = result.records[rank];
      if (rank != stalled) {
        ExpectRecord(record, stall.others_code, stalled, result.step);
      } else if (stall.own_code != 0) {
        ExpectRecord(record, stall.own_code, stalled, result.step);
      } else {
        // It may have had all it needs; if not, it waited for one that gave up.
        EXPECT_EQ(record.complete, record.code != 0);
        EXPECT_TRUE(record.code == 0 || record.peer != static_cast<uint32_t>(stalled));
      }
    }
    scene.ExpectTheNextStepIsRight();
  }
}

class EpMoeStopTest : public testing::EpTest {};

INSTANTIATE_TEST_SUITE_P(Ranks, EpMoeStopTest, ::testing::ValuesIn(testing::kEpSites),
                         testing::EpSiteName);

// All wait for the last rank's routes; the first one is told to stop long before its limit.
TEST_P(EpMoeStopTest, TheStopWordOfOneRankEndsThatRankAtOnceAndTheOthersAtTheirLimit) {
  Scene scene(GetParam());
  ASSERT_NE(scene.group, nullptr);
  const absl::Duration timeout = absl::Seconds(1);
  const RankGroup::Disturbed result =
      scene.group->RunDisturbed(scene.batches, {.stalled_rank = num_ranks() - 1,
                                                .stall = cuda::moe_layer::kStallRoutes,
                                                .timeout = timeout,
                                                .stopped_ranks = {0},
                                                .stop_after = absl::Milliseconds(50)});
  EXPECT_EQ(result.records[0].code, cuda::moe_layer::kStopped);
  EXPECT_EQ(result.records[0].step, result.step);
  EXPECT_EQ(result.records[0].complete, 1u);
  EXPECT_LT(result.ended[0], absl::Milliseconds(300));
  for (int rank = 1; rank < num_ranks(); ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    EXPECT_LT(result.ended[rank], timeout + kMargin);
    if (rank == num_ranks() - 1) continue;
    EXPECT_EQ(result.records[rank].code, cuda::moe_layer::kWaitRoutes);
    EXPECT_EQ(result.records[rank].peer, static_cast<uint32_t>(num_ranks() - 1));
    EXPECT_GE(result.ended[rank], timeout);
  }
  scene.ExpectTheNextStepIsRight();
}

// As a host does that ends a generation: nobody waits for the limit.
TEST_P(EpMoeStopTest, TheStopWordsOfAllRanksEndAllWithinMilliseconds) {
  Scene scene(GetParam());
  ASSERT_NE(scene.group, nullptr);
  std::vector<int> everyone(num_ranks());
  std::iota(everyone.begin(), everyone.end(), 0);
  const RankGroup::Disturbed result =
      scene.group->RunDisturbed(scene.batches, {.stalled_rank = 0,
                                                .stall = cuda::moe_layer::kStallTokens,
                                                .timeout = absl::Seconds(5),
                                                .stopped_ranks = everyone,
                                                .stop_after = absl::Milliseconds(50)});
  for (int rank = 0; rank < num_ranks(); ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    EXPECT_EQ(result.records[rank].code, cuda::moe_layer::kStopped);
    EXPECT_LT(result.ended[rank], absl::Milliseconds(50 + 50));
  }
  scene.ExpectTheNextStepIsRight();
}

}  // namespace
}  // namespace expertd
