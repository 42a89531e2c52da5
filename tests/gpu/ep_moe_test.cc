#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/formats.h"
#include "kernels/reference/reference.h"
#include "tests/gpu/testing/ep_fixture.h"
#include "tests/gpu/testing/fused_layer.h"
#include "tests/gpu/testing/moe_cases.h"

// The fused kernel as R ranks: against the plain kernels, the double reference and itself as one
// rank. Rows of one batch are spread over the ranks, so that one answer serves every spread.
namespace expertd {
namespace {

using testing::FirstDifference;
using testing::FusedLayer;
using testing::HostBatch;
using testing::HostLayer;
using testing::Joined;
using testing::MakeGroup;
using testing::PlacementFor;
using testing::RankBatches;
using testing::RankGroup;
using testing::RankOutputs;
using testing::Routing;
using testing::SplitRows;

constexpr double kBound = 5e-3;  // as in fused_moe_test

LayerSpec Spec(int64_t hidden, int64_t intermediate, int32_t experts, int32_t top_k,
               float limit = 0, Recipe recipe = Recipe::kMxfp4) {
  return {.hidden_size = hidden,
          .intermediate_size = intermediate,
          .num_experts = experts,
          .top_k = top_k,
          .recipe = recipe,
          .swiglu_limit = limit};
}

int32_t Sum(const std::vector<int32_t>& values) {
  return std::accumulate(values.begin(), values.end(), 0);
}

std::string Describe(const std::vector<int32_t>& mix) {
  return absl::StrCat("T = ", absl::StrJoin(mix, " "));
}

double RelL2(const std::vector<float>& actual, const std::vector<float>& expected) {
  return reference::RelL2(actual, std::vector<double>(expected.begin(), expected.end()));
}

// Every route to an expert that rank `rank` alone holds in a contiguous placement.
void RouteToRank(HostBatch& batch, const Placement& placement, int rank) {
  std::vector<int32_t> held;
  for (int32_t slot = 0; slot < placement.slots_per_rank(); ++slot) {
    if (placement.ExpertAt(rank, slot) >= 0) held.push_back(placement.ExpertAt(rank, slot));
  }
  ASSERT_FALSE(held.empty());
  for (size_t r = 0; r < batch.ids.size(); ++r) batch.ids[r] = held[r * 7 % held.size()];
}

class EpMoeTest : public testing::EpTest {
 protected:
  // As R ranks (BF16 output) against `expected`, twice, bit for bit the same.
  static void Compare(RankGroup& group, const HostBatch& batch, const std::vector<int32_t>& mix,
                      int64_t hidden_size, const std::vector<float>& expected,
                      const std::string& what) {
    const RankBatches batches = SplitRows(batch, hidden_size, mix);
    const std::vector<uint8_t> first = Joined(group.Run(batches));
    EXPECT_LT(RelL2(testing::AsFloats(first, DType::kBf16), expected), kBound) << what;
    EXPECT_EQ(FirstDifference(first, Joined(group.Run(batches))), -1) << what << ": second run";
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, EpMoeTest, ::testing::ValuesIn(testing::kEpSites),
                         testing::EpSiteName);

TEST_P(EpMoeTest, EveryMixOfTAgreesWithThePlainPath) {
  constexpr int32_t kMaxTokens = 300;
  const HostLayer host = testing::MakeRandomLayer(Spec(1024, 640, 24, 6, 10), 31);
  FusedLayer one(host, kMaxTokens * num_ranks(), 6);
  const auto group = MakeGroup(GetParam(), host, PlacementFor(24, num_ranks()), {kMaxTokens, 6});
  ASSERT_NE(group, nullptr);
  for (const std::vector<int32_t>& mix : testing::TokenMixes(num_ranks(), kMaxTokens)) {
    const HostBatch batch = testing::MakeRandomBatch(host.spec, Sum(mix), 6, Routing::kUniform, 32);
    Compare(*group, batch, mix, 1024, one.RunPlain(batch), Describe(mix));
    if (HasFailure()) return;
  }
}

TEST_P(EpMoeTest, EveryRoutingAgreesWithTheDoubleReference) {
  const std::vector<int32_t> mix(num_ranks(), 96 / num_ranks());
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const HostLayer host = testing::MakeRandomLayer(Spec(512, 320, 16, 4, 1.5f, recipe), 33);
    const auto group = MakeGroup(GetParam(), host, PlacementFor(16, num_ranks()), {96, 4});
    ASSERT_NE(group, nullptr);
    for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kOneExpert,
                                  Routing::kMasked, Routing::kAllMasked}) {
      const HostBatch batch = testing::MakeRandomBatch(host.spec, 96, 4, routing, 34);
      const std::vector<double> expected = testing::ReferenceRows(host, batch);
      for (const DType output : {DType::kF32, DType::kBf16}) {
        const RankOutputs outputs = group->Run(SplitRows(batch, 512, mix), output);
        EXPECT_LT(reference::RelL2(testing::AsFloats(Joined(outputs), output), expected), kBound)
            << testing::RoutingName(routing);
      }
    }
  }
}

TEST_P(EpMoeTest, AllRoutesToOneRankAgreeWithThePlainPath) {
  constexpr int32_t kMaxTokens = 200;
  const HostLayer host = testing::MakeRandomLayer(Spec(768, 384, 32, 8), 35);
  const Placement placement = PlacementFor(32, num_ranks());
  FusedLayer one(host, kMaxTokens * num_ranks(), 8);
  const auto group = MakeGroup(GetParam(), host, placement, {kMaxTokens, 8});
  ASSERT_NE(group, nullptr);
  for (const int busy : {0, num_ranks() - 1}) {
    for (const std::vector<int32_t>& mix : testing::TokenMixes(num_ranks(), kMaxTokens)) {
      HostBatch batch = testing::MakeRandomBatch(host.spec, Sum(mix), 8, Routing::kUniform, 36);
      RouteToRank(batch, placement, busy);
      Compare(*group, batch, mix, 768, one.RunPlain(batch),
              absl::StrCat("to rank ", busy, ", ", Describe(mix)));
      if (HasFailure()) return;
    }
  }
}

TEST_P(EpMoeTest, ThirtyTwoRoutesWithDuplicatesAndMasksAgreeWithThePlainPath) {
  const std::vector<int32_t> mix(num_ranks(), 70);
  const HostLayer host = testing::MakeRandomLayer(Spec(512, 256, 40, 32), 37);
  FusedLayer one(host, 70 * num_ranks(), 32);
  const auto group = MakeGroup(GetParam(), host, PlacementFor(40, num_ranks()), {70, 32});
  ASSERT_NE(group, nullptr);
  for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kMasked}) {
    const HostBatch batch = testing::MakeRandomBatch(host.spec, Sum(mix), 32, routing, 38);
    Compare(*group, batch, mix, 512, one.RunPlain(batch), testing::RoutingName(routing));
  }
}

TEST_P(EpMoeTest, ManyTokensOfManyChunksOfRoutesAgreeWithThePlainPath) {
  const int32_t tokens = 4096 / num_ranks();
  const std::vector<int32_t> mix(num_ranks(), tokens);
  const HostLayer host = testing::MakeRandomLayer(Spec(512, 256, 64, 8), 39);
  FusedLayer one(host, 4096, 8);
  const auto group = MakeGroup(GetParam(), host, PlacementFor(64, num_ranks()), {4096, 8});
  ASSERT_NE(group, nullptr);
  std::vector<int32_t> on_one(num_ranks(), 0);
  on_one[num_ranks() - 1] = 4096;
  for (const Routing routing : {Routing::kUniform, Routing::kSkewed}) {
    const HostBatch batch = testing::MakeRandomBatch(host.spec, 4096, 8, routing, 40);
    const std::vector<float> expected = one.RunPlain(batch);
    Compare(*group, batch, mix, 512, expected, testing::RoutingName(routing));
    Compare(*group, batch, on_one, 512, expected, Describe(on_one));
  }
}

TEST_P(EpMoeTest, CtasThatShareTheSortFindTheOrderThatEachFindsAlone) {
  const HostLayer host = testing::MakeRandomLayer(Spec(512, 256, 40, 4), 48);
  const Placement placement = PlacementFor(40, num_ranks(), 8);
  const auto alone = MakeGroup(GetParam(), host, placement, {.max_tokens = 100, .max_top_k = 4});
  const auto together = MakeGroup(GetParam(), host, placement,
                                  {.max_tokens = 100, .max_top_k = 4, .own_sort_routes = -1});
  ASSERT_NE(alone, nullptr);
  ASSERT_NE(together, nullptr);
  for (const Routing routing : {Routing::kUniform, Routing::kOneExpert, Routing::kMasked}) {
    for (const std::vector<int32_t>& mix : testing::TokenMixes(num_ranks(), 100)) {
      const HostBatch batch = testing::MakeRandomBatch(host.spec, Sum(mix), 4, routing, 49);
      const auto split = SplitRows(batch, 512, mix);
      EXPECT_EQ(testing::FirstDifference(Joined(together->Run(split)), Joined(alone->Run(split))),
                -1)
          << testing::RoutingName(routing) << ", " << Describe(mix);
      if (HasFailure()) return;
    }
  }
}

TEST_P(EpMoeTest, ALastRankWithFewerExpertsAndOnesWithNoneAgreeWithThePlainPath) {
  for (const int32_t experts : {1, num_ranks() - 1, 13, 8 * num_ranks() - 3}) {
    const int32_t top_k = std::min(4, experts);
    const HostLayer host = testing::MakeRandomLayer(Spec(320, 192, experts, top_k), experts);
    FusedLayer one(host, 90 * num_ranks(), top_k);
    const auto group = MakeGroup(GetParam(), host, PlacementFor(experts, num_ranks()), {90, top_k});
    ASSERT_NE(group, nullptr);
    for (const std::vector<int32_t>& mix : testing::TokenMixes(num_ranks(), 90)) {
      const HostBatch batch =
          testing::MakeRandomBatch(host.spec, Sum(mix), top_k, Routing::kUniform, 41);
      Compare(*group, batch, mix, 320, one.RunPlain(batch),
              absl::StrCat("E ", experts, ", ", Describe(mix)));
      if (HasFailure()) return;
    }
  }
}

TEST_P(EpMoeTest, ReplicasOfRedundantSlotsAgreeWithThePlainPath) {
  const HostLayer host = testing::MakeRandomLayer(Spec(512, 256, 16, 6), 42);
  FusedLayer one(host, 80 * num_ranks(), 6);
  // Half as many slots more than experts, and every expert on every rank.
  for (const int32_t spare : {8, 16 * (num_ranks() - 1)}) {
    const auto group = MakeGroup(GetParam(), host, PlacementFor(16, num_ranks(), spare), {80, 6});
    ASSERT_NE(group, nullptr);
    for (const std::vector<int32_t>& mix : testing::TokenMixes(num_ranks(), 80)) {
      HostBatch batch = testing::MakeRandomBatch(host.spec, Sum(mix), 6, Routing::kMasked, 43);
      for (size_t t = 0; t < batch.row_in_request.size(); ++t) {
        batch.row_in_request[t] = static_cast<int32_t>(t * 5 % 17);
      }
      Compare(*group, batch, mix, 512, one.RunPlain(batch),
              absl::StrCat(spare, " spare slots, ", Describe(mix)));
      if (HasFailure()) return;
    }
  }
}

TEST_P(EpMoeTest, RanksMayHaveDifferentKInOneStep) {
  const HostLayer host = testing::MakeRandomLayer(Spec(512, 256, 24, 8), 44);
  FusedLayer one(host, 60, 8);
  const auto group = MakeGroup(GetParam(), host, PlacementFor(24, num_ranks()), {60, 8});
  ASSERT_NE(group, nullptr);
  RankBatches batches;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    batches.push_back(testing::MakeRandomBatch(host.spec, 60 - 7 * (rank % 4), 1 + 3 * rank % 8,
                                               Routing::kUniform, 45 + rank));
  }
  const RankOutputs outputs = group->Run(batches);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    EXPECT_LT(RelL2(testing::AsFloats(outputs[rank], DType::kBf16), one.RunPlain(batches[rank])),
              kBound)
        << "rank " << rank << ", K " << batches[rank].top_k;
  }
}

// The same rows alone, among others, on any rank, in any order: the same bits.
TEST_P(EpMoeTest, ARowsBitsDependNeitherOnItsNeighboursNorOnItsHomeRank) {
  constexpr int32_t kRows = 300;
  const HostLayer host = testing::MakeRandomLayer(Spec(1024, 512, 16, 6, 10), 46);
  const HostBatch batch = testing::MakeRandomBatch(host.spec, kRows, 6, Routing::kSkewed, 47);
  const int64_t row_bytes = 2 * host.spec.hidden_size;
  std::mt19937 random(48);
  for (const int32_t spare : {0, 8}) {
    const auto group =
        MakeGroup(GetParam(), host, PlacementFor(16, num_ranks(), spare), {kRows, 6});
    ASSERT_NE(group, nullptr);
    std::vector<int32_t> all_on_first(num_ranks(), 0);
    all_on_first[0] = kRows;
    const std::vector<uint8_t> whole = group->Run(SplitRows(batch, 1024, all_on_first))[0];
    for (int round = 0; round < 12; ++round) {
      RankBatches batches;
      std::vector<std::vector<int32_t>> rows(num_ranks());
      for (std::vector<int32_t>& mine : rows) {
        mine.resize(random() % 3 == 0 ? random() % 3 : random() % kRows);
        for (int32_t& row : mine) row = static_cast<int32_t>(random() % kRows);
        batches.push_back(testing::SelectRows(batch, 1024, mine));
      }
      const RankOutputs outputs = group->Run(batches);
      for (int rank = 0; rank < num_ranks(); ++rank) {
        for (size_t i = 0; i < rows[rank].size(); ++i) {
          ASSERT_TRUE(std::equal(outputs[rank].begin() + i * row_bytes,
                                 outputs[rank].begin() + (i + 1) * row_bytes,
                                 whole.begin() + rows[rank][i] * row_bytes))
              << "row " << rows[rank][i] << " at home on rank " << rank << " among "
              << rows[rank].size() << ", " << spare << " spare slots";
        }
      }
    }
  }
}

TEST_P(EpMoeTest, StepsBackToBackGiveTheBitsOfStepsAlone) {
  const HostLayer host = testing::MakeRandomLayer(Spec(768, 384, 24, 6), 49);
  const auto group = MakeGroup(GetParam(), host, PlacementFor(24, num_ranks()), {200, 6});
  ASSERT_NE(group, nullptr);
  std::vector<RankBatches> steps;
  for (const std::vector<int32_t>& mix : testing::TokenMixes(num_ranks(), 200)) {
    const HostBatch batch = testing::MakeRandomBatch(host.spec, Sum(mix), 6, Routing::kMasked, 50);
    steps.push_back(SplitRows(batch, 768, mix));
  }
  std::vector<RankOutputs> alone;
  for (const RankBatches& step : steps) alone.push_back(group->Run(step));
  const std::vector<RankOutputs> together = group->RunSteps(steps);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(FirstDifference(Joined(together[i]), Joined(alone[i])), -1) << "step " << i;
  }
}

TEST_P(EpMoeTest, FuzzedShapesAgreeWithThePlainPath) {
  std::mt19937 random(20261130 + num_ranks());
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 24; ++round) {
    const int32_t experts = round % 6 == 0 ? pick(200, 1024) : pick(1, 48);
    const int widest = experts > 64 ? 3 : 16;
    const int32_t top_k = pick(1, 32);
    const Recipe recipe = pick(0, 1) == 0 ? Recipe::kMxfp4 : Recipe::kNvfp4;
    const HostLayer host =
        testing::MakeRandomLayer(Spec(64 * pick(1, widest), 64 * pick(1, widest), experts, top_k,
                                      round % 3 == 0 ? 0 : 2.0f, recipe),
                                 round);
    const int32_t spare = round % 2 == 0 ? 0 : pick(1, experts);
    const RankGroup::Options options = {.max_tokens = 300,
                                        .max_top_k = top_k,
                                        .partials_bf16 = pick(0, 3) == 0,
                                        .config_of_own_tokens = pick(0, 1) == 0};
    FusedLayer one(host, 300 * num_ranks(), top_k);
    const auto group =
        MakeGroup(GetParam(), host, PlacementFor(experts, num_ranks(), spare), options);
    ASSERT_NE(group, nullptr);
    for (int i = 0; i < 3; ++i) {
      std::vector<int32_t> mix(num_ranks());
      for (int32_t& tokens : mix) {
        tokens = pick(0, 3) == 0 ? 0 : pick(0, 1) == 0 ? pick(1, 9) : pick(1, 300);
      }
      const auto routing = static_cast<Routing>(pick(0, 4));
      const HostBatch batch =
          testing::MakeRandomBatch(host.spec, Sum(mix), top_k, routing, round * 10 + i);
      Compare(*group, batch, mix, host.spec.hidden_size, one.RunPlain(batch),
              absl::StrCat("round ", round, ": H ", host.spec.hidden_size, ", I ",
                           host.spec.intermediate_size, ", E ", experts, ", ", spare, " spare, K ",
                           top_k, ", ", Describe(mix), ", ", testing::RoutingName(routing), ", ",
                           std::string(RecipeName(recipe)),
                           options.partials_bf16 ? ", BF16 partials" : ""));
      if (HasFailure()) return;
    }
  }
}

// --- one rank against R ranks

// Distance to the next number of that type.
double Ulp(double value, DType dtype) {
  const int exponent = std::ilogb(std::max(std::abs(value), 0x1p-100));
  return std::ldexp(1.0, exponent - (dtype == DType::kF32 ? 23 : 7));
}

// Every route of the batch as a row of its own.
HostBatch RouteRows(const HostBatch& batch, int64_t hidden_size) {
  HostBatch rows;
  rows.num_tokens = batch.num_tokens * batch.top_k;
  rows.top_k = 1;
  rows.ids = batch.ids;
  rows.weights = batch.weights;
  for (int32_t route = 0; route < rows.num_tokens; ++route) {
    const auto row = batch.hidden.begin() + route / batch.top_k * hidden_size;
    rows.hidden.insert(rows.hidden.end(), row, row + hidden_size);
    rows.row_in_request.push_back(batch.row_in_request[route / batch.top_k]);
  }
  return rows;
}

class EpMoeOneAgainstManyTest : public testing::EpTest {
 protected:
  static constexpr int32_t kTokens = 96;
  static constexpr int32_t kTopK = 8;
  static constexpr int64_t kHidden = 1024;

  // |a - b| <= 1 ulp(output) + 2K 2^-24 sum_k |w_k y_k| [+ 2^-8 sum_r |partial_r|]
  void Check(const Placement& placement, bool partials_bf16, DType output) {
    const HostLayer host = testing::MakeRandomLayer(Spec(kHidden, 512, 24, kTopK, 10), 51);
    const HostBatch batch =
        testing::MakeRandomBatch(host.spec, kTokens, kTopK, Routing::kSkewed, 52);
    FusedLayer one(host, kTokens, kTopK);
    FusedLayer route_by_route(host, kTokens * kTopK, 1);
    const std::vector<float> terms = route_by_route.RunFusedF32(RouteRows(batch, kHidden));
    const std::vector<float> expected = testing::AsFloats(one.RunFused(batch, output), output);
    const auto group =
        MakeGroup(GetParam(), host, placement,
                  {.max_tokens = kTokens, .max_top_k = kTopK, .partials_bf16 = partials_bf16});
    ASSERT_NE(group, nullptr);
    const std::vector<int32_t> mix(num_ranks(), kTokens / num_ranks());
    const std::vector<float> actual =
        testing::AsFloats(Joined(group->Run(SplitRows(batch, kHidden, mix), output)), output);
    ASSERT_EQ(actual.size(), expected.size());
    for (int32_t t = 0; t < kTokens; ++t) {
      for (int64_t i = 0; i < kHidden; ++i) {
        double size = 0;
        std::vector<double> partials(num_ranks(), 0.0);
        for (int32_t k = 0; k < kTopK; ++k) {
          const int32_t id = batch.ids[t * kTopK + k];
          if (id < 0) continue;
          const double term = terms[(t * kTopK + k) * kHidden + i];
          size += std::abs(term);
          partials[placement.SlotFor(id, batch.row_in_request[t]) / placement.slots_per_rank()] +=
              term;
        }
        double rounded = 0;
        for (const double partial : partials) rounded += std::abs(partial);
        const float a = actual[t * kHidden + i];
        const float b = expected[t * kHidden + i];
        const double bound = Ulp(std::max(std::abs(a), std::abs(b)), output) +
                             2 * kTopK * 0x1p-24 * size + (partials_bf16 ? 0x1p-8 * rounded : 0.0);
        ASSERT_LE(std::abs(double{a} - b), bound) << "token " << t << ", column " << i;
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, EpMoeOneAgainstManyTest, ::testing::ValuesIn(testing::kEpSites),
                         testing::EpSiteName);

TEST_P(EpMoeOneAgainstManyTest, F32PartialsDifferByTheOrderOfTheSumOnly) {
  for (const int32_t spare : {0, 12}) {
    for (const DType output : {DType::kF32, DType::kBf16}) {
      Check(PlacementFor(24, num_ranks(), spare), false, output);
    }
  }
}

TEST_P(EpMoeOneAgainstManyTest, Bf16PartialsDifferByTheirRoundingToo) {
  for (const DType output : {DType::kF32, DType::kBf16}) {
    Check(PlacementFor(24, num_ranks()), true, output);
  }
}

}  // namespace
}  // namespace expertd
