#include "kernels/cuda/host_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/reference/reference.h"
#include "tests/gpu/testing/ep_fixture.h"
#include "tests/gpu/testing/exchange_ranks.h"
#include "tests/gpu/testing/fused_layer.h"
#include "tests/gpu/testing/moe_cases.h"

// A layer as R ranks that exchange rows between launches: against the plain kernels, the double
// reference and the exchange inside the kernel. Ranks are threads, on one GPU by copies or on one
// each through NCCL; host_exchange_fault_test.cc has those that fail, and processes.
namespace expertd {
namespace {

using testing::ExchangeRanks;
using testing::ExchangeRanksOptions;
using testing::FirstDifference;
using testing::FusedLayer;
using testing::HostBatch;
using testing::HostLayer;
using testing::Joined;
using testing::PlacementFor;
using testing::RankBatches;
using testing::Routing;
using testing::SplitRows;

constexpr double kBound = 5e-3;  // as in fused_moe_test

struct Site {
  bool nccl;
  int num_ranks;
};
void PrintTo(const Site& site, std::ostream* out) {
  *out << (site.nccl ? "Nccl" : "Local") << site.num_ranks;
}

LayerSpec Spec(int64_t hidden, int64_t intermediate, int32_t experts, int32_t top_k,
               Recipe recipe = Recipe::kMxfp4) {
  return {.hidden_size = hidden,
          .intermediate_size = intermediate,
          .num_experts = experts,
          .top_k = top_k,
          .recipe = recipe,
          .swiglu_limit = 1.5f};
}

double RelL2(const std::vector<float>& actual, const std::vector<float>& expected) {
  return reference::RelL2(actual, std::vector<double>(expected.begin(), expected.end()));
}

class HostExchangeTest : public testing::GpuTest, public ::testing::WithParamInterface<Site> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || !GetParam().nccl) return;
    int count = 0;
    ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    if (count < num_ranks()) {
      GTEST_SKIP() << "needs " << num_ranks() << " GPUs, found " << count;
    }
  }

  static int num_ranks() { return GetParam().num_ranks; }

  static std::unique_ptr<ExchangeRanks> MakeRanks(const HostLayer& layer,
                                                  const Placement& placement, int32_t max_tokens,
                                                  int32_t max_top_k, bool partials_bf16 = false) {
    ExchangeRanksOptions options;
    options.nccl = GetParam().nccl;
    options.max_tokens = max_tokens;
    options.max_top_k = max_top_k;
    options.partials_bf16 = partials_bf16;
    auto ranks = ExchangeRanks::Make(layer, placement, options);
    EXPECT_TRUE(ranks.ok()) << ranks.status();
    return ranks.ok() ? *std::move(ranks) : nullptr;
  }

  // Rows of `batch` spread as `mix` says: near `expected`, and twice the same bits.
  static void Compare(ExchangeRanks& ranks, const HostBatch& batch, const std::vector<int32_t>& mix,
                      int64_t hidden_size, const std::vector<float>& expected,
                      const std::string& what) {
    const RankBatches batches = SplitRows(batch, hidden_size, mix);
    const std::vector<uint8_t> first = Joined(ranks.Run(batches));
    EXPECT_LT(RelL2(testing::AsFloats(first, DType::kBf16), expected), kBound) << what;
    EXPECT_EQ(FirstDifference(Joined(ranks.Run(batches)), first), -1) << what << ", again";
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, HostExchangeTest,
                         ::testing::Values(Site{false, 1}, Site{false, 2}, Site{false, 3},
                                           Site{false, 8}, Site{true, 2}, Site{true, 4}),
                         ::testing::PrintToStringParamName());

std::string Describe(const std::vector<int32_t>& mix) {
  return absl::StrCat("T = ", absl::StrJoin(mix, " "));
}

TEST_P(HostExchangeTest, AgreesWithThePlainPathHoweverTheTokensLie) {
  constexpr int32_t kMax = 65;
  const HostLayer layer = testing::MakeRandomLayer(Spec(512, 320, 21, 4), 1);
  auto ranks = MakeRanks(layer, PlacementFor(21, num_ranks()), kMax, 4);
  ASSERT_NE(ranks, nullptr);
  FusedLayer whole(layer, kMax * num_ranks(), 4);
  for (const std::vector<int32_t>& mix : testing::TokenMixes(num_ranks(), kMax)) {
    const int32_t tokens = std::accumulate(mix.begin(), mix.end(), 0);
    const HostBatch batch =
        testing::MakeRandomBatch(layer.spec, tokens, 4, Routing::kUniform, tokens);
    Compare(*ranks, batch, mix, 512, whole.RunPlain(batch), Describe(mix));
  }
}

TEST_P(HostExchangeTest, AgreesWithTheReferenceForEveryRoutingAndRecipe) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const HostLayer layer = testing::MakeRandomLayer(Spec(256, 192, 11, 4, recipe), 2);
    auto ranks = MakeRanks(layer, PlacementFor(11, num_ranks()), 40, 4);
    ASSERT_NE(ranks, nullptr);
    std::vector<int32_t> mix(num_ranks(), 9);
    mix[0] = 0;
    mix.back() = 40;
    const int32_t tokens = std::accumulate(mix.begin(), mix.end(), 0);
    for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kOneExpert,
                                  Routing::kMasked, Routing::kAllMasked}) {
      const HostBatch batch = testing::MakeRandomBatch(layer.spec, tokens, 4, routing, 3);
      const std::vector<double> expected = testing::ReferenceRows(layer, batch);
      Compare(*ranks, batch, mix, 256, std::vector<float>(expected.begin(), expected.end()),
              testing::RoutingName(routing) + (recipe == Recipe::kMxfp4 ? ", mxfp4" : ", nvfp4"));
    }
  }
}

TEST_P(HostExchangeTest, EveryRouteMayGoToOneRank) {
  const Placement placement = PlacementFor(16, num_ranks());
  const HostLayer layer = testing::MakeRandomLayer(Spec(256, 128, 16, 32), 3);
  auto ranks = MakeRanks(layer, placement, 50, 32);
  ASSERT_NE(ranks, nullptr);
  FusedLayer whole(layer, 50 * num_ranks(), 32);
  for (const int target : {0, num_ranks() - 1}) {
    HostBatch batch =
        testing::MakeRandomBatch(layer.spec, 50 * num_ranks(), 32, Routing::kSkewed, 4);
    for (size_t r = 0; r < batch.ids.size(); ++r) {
      const int32_t slot = static_cast<int32_t>(r * 7 % placement.slots_per_rank());
      batch.ids[r] = std::max(placement.ExpertAt(target, slot), placement.ExpertAt(target, 0));
    }
    Compare(*ranks, batch, std::vector<int32_t>(num_ranks(), 50), 256, whole.RunPlain(batch),
            absl::StrCat("all to rank ", target));
  }
}

TEST_P(HostExchangeTest, KMayDifferBetweenRanks) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(192, 128, 40, 8), 5);
  auto ranks = MakeRanks(layer, PlacementFor(40, num_ranks()), 30, 32);
  ASSERT_NE(ranks, nullptr);
  FusedLayer whole(layer, 30, 32);
  RankBatches batches;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const int32_t top_k = 1 + (rank * 13 + 7) % 32;
    batches.push_back(
        testing::MakeRandomBatch(layer.spec, 30 - rank, top_k, Routing::kMasked, rank));
  }
  const auto outputs = ranks->Run(batches);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    EXPECT_LT(RelL2(testing::AsFloats(outputs[rank], DType::kBf16), whole.RunPlain(batches[rank])),
              kBound)
        << "rank " << rank << ", K = " << batches[rank].top_k;
  }
}

// F32 outputs too: their bits say more.
TEST_P(HostExchangeTest, ARowsBitsDoNotDependOnItsHomeOrItsNeighbours) {
  for (const bool bf16 : {false, true}) {
    const HostLayer layer = testing::MakeRandomLayer(Spec(512, 256, 16, 6), 6);
    auto ranks = MakeRanks(layer, PlacementFor(16, num_ranks(), 4), 64, 6, bf16);
    ASSERT_NE(ranks, nullptr);
    HostBatch batch = testing::MakeRandomBatch(layer.spec, 64, 6, Routing::kSkewed, 7);
    std::mt19937 random(8);
    for (int32_t& row : batch.row_in_request) row = static_cast<int32_t>(random() % 1000);
    std::vector<int32_t> mix(num_ranks(), 0);
    mix[0] = 64;
    const std::vector<uint8_t> expected =
        Joined(ranks->Run(SplitRows(batch, 512, mix), DType::kF32));
    FusedLayer whole(layer, 64, 6);
    EXPECT_LT(RelL2(testing::AsFloats(expected, DType::kF32), whole.RunPlain(batch)), kBound);
    for (int round = 0; round < 4; ++round) {
      std::fill(mix.begin(), mix.end(), 0);
      for (int32_t token = 0; token < 64; ++token) ++mix[random() % mix.size()];
      EXPECT_EQ(
          FirstDifference(Joined(ranks->Run(SplitRows(batch, 512, mix), DType::kF32)), expected),
          -1)
          << Describe(mix) << (bf16 ? ", bf16 partial rows" : "");
    }
  }
}

// The same owners, the same partial rows, the same order.
TEST_P(HostExchangeTest, GivesTheBitsOfTheExchangeInsideTheKernel) {
  for (const bool bf16 : {false, true}) {
    const HostLayer layer = testing::MakeRandomLayer(Spec(1024, 384, 24, 6), 9);
    const Placement placement = PlacementFor(24, num_ranks(), 7);
    const testing::EpSite site = {
        GetParam().nccl ? testing::RankMode::kDeviceEach : testing::RankMode::kSameDevice,
        num_ranks()};
    if (const std::string reason = testing::WhyNot(site); !reason.empty()) GTEST_SKIP() << reason;
    auto group = testing::MakeGroup(site, layer, placement,
                                    {.max_tokens = 70, .max_top_k = 6, .partials_bf16 = bf16});
    auto ranks = MakeRanks(layer, placement, 70, 6, bf16);
    ASSERT_NE(group, nullptr);
    ASSERT_NE(ranks, nullptr);
    for (const std::vector<int32_t>& mix : testing::TokenMixes(num_ranks(), 70)) {
      const int32_t tokens = std::accumulate(mix.begin(), mix.end(), 0);
      const HostBatch batch =
          testing::MakeRandomBatch(layer.spec, tokens, 6, Routing::kMasked, tokens + 1);
      const RankBatches batches = SplitRows(batch, 1024, mix);
      EXPECT_EQ(FirstDifference(Joined(ranks->Run(batches, DType::kF32)),
                                Joined(group->Run(batches, DType::kF32))),
                -1)
          << Describe(mix) << (bf16 ? ", bf16 partial rows" : "");
    }
  }
}

// The answer of every row is known before: any rows, anywhere, in any number.
TEST_P(HostExchangeTest, RandomStepsOfRandomSizesGiveTheRowsOfThePool) {
  constexpr int32_t kPool = 200;
  constexpr int64_t kHidden = 256;
  const HostLayer layer = testing::MakeRandomLayer(Spec(kHidden, 128, 19, 5), 10);
  auto ranks = MakeRanks(layer, PlacementFor(19, num_ranks(), 3), kPool, 5);
  ASSERT_NE(ranks, nullptr);
  const HostBatch pool = testing::MakeRandomBatch(layer.spec, kPool, 5, Routing::kMasked, 11);
  std::vector<int32_t> mix(num_ranks(), 0);
  mix[0] = kPool;
  const std::vector<uint8_t> answers = Joined(ranks->Run(SplitRows(pool, kHidden, mix)));
  std::mt19937 random(12);
  for (int step = 0; step < 150; ++step) {
    RankBatches batches;
    std::vector<uint8_t> expected;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      std::vector<int32_t> rows(random() % 3 == 0 ? 0 : random() % 40);
      for (int32_t& row : rows) {
        row = static_cast<int32_t>(random() % kPool);
        const auto answer = answers.begin() + row * kHidden * 2;
        expected.insert(expected.end(), answer, answer + kHidden * 2);
      }
      batches.push_back(testing::SelectRows(pool, kHidden, rows));
    }
    ASSERT_EQ(FirstDifference(Joined(ranks->Run(batches)), expected), -1) << "step " << step;
  }
}

// For the memory checker.
TEST_P(HostExchangeTest, SmallShapesTouchOnlyTheirMemory) {
  const HostLayer layer = testing::MakeRandomLayer(Spec(192, 128, 5, 3), 15);
  auto ranks = MakeRanks(layer, PlacementFor(5, num_ranks(), 2), 9, 3);
  ASSERT_NE(ranks, nullptr);
  std::vector<int32_t> mix(num_ranks(), 3);
  mix[0] = 9;
  mix.back() = num_ranks() > 1 ? 0 : 9;
  const int32_t tokens = std::accumulate(mix.begin(), mix.end(), 0);
  const HostBatch batch = testing::MakeRandomBatch(layer.spec, tokens, 3, Routing::kMasked, 16);
  const std::vector<double> expected = testing::ReferenceRows(layer, batch);
  Compare(*ranks, batch, mix, 192, std::vector<float>(expected.begin(), expected.end()), "small");
}

TEST_P(HostExchangeTest, ALargeStepOfARealGeometryAgreesWithThePlainPath) {
  if (num_ranks() > 2) GTEST_SKIP() << "two ranks are enough";
  const HostLayer layer = testing::MakeRandomLayer(Spec(4096, 2048, 16, 6), 13);
  auto ranks = MakeRanks(layer, PlacementFor(16, num_ranks()), 1500, 6);
  ASSERT_NE(ranks, nullptr);
  FusedLayer whole(layer, 1500 * num_ranks(), 6);
  const HostBatch batch =
      testing::MakeRandomBatch(layer.spec, 1500 * num_ranks(), 6, Routing::kUniform, 14);
  Compare(*ranks, batch, std::vector<int32_t>(num_ranks(), 1500), 4096, whole.RunPlain(batch),
          "T = 1500 a rank");
}

}  // namespace
}  // namespace expertd
