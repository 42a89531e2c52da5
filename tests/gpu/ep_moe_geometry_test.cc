#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/reference/reference.h"
#include "tests/gpu/testing/ep_fixture.h"
#include "tests/gpu/testing/fused_layer.h"
#include "tests/gpu/testing/moe_cases.h"

// The geometries of published models as R ranks against the plain path: on one GPU the experts of
// one rank of eight spread over all ranks, on several GPUs as many on each.
namespace expertd {
namespace {

using testing::EpSite;
using testing::FusedLayer;
using testing::HostBatch;
using testing::HostLayer;
using testing::Routing;

constexpr double kBound = 5e-3;  // as in fused_moe_test
constexpr int32_t kMaxTokens = 1024;

struct Geometry {
  const char* name;
  int64_t hidden;
  int64_t intermediate;
  int32_t experts;
  int32_t top_k;
  float limit;
};

const Geometry kGeometries[] = {
    {"pro_fold", 7168, 3072, 48, 6, 10},   {"v3_fold", 7168, 2048, 32, 8, 0},
    {"gptoss", 2880, 2880, 128, 4, 0},     {"qwen3", 4096, 1536, 128, 8, 0},
    {"flash_fold", 4096, 2048, 32, 6, 10},
};

struct Case {
  Geometry geometry;
  Recipe recipe;

  std::string Name() const {
    return absl::StrCat(geometry.name, "_", std::string(RecipeName(recipe)));
  }
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.Name(); }

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const Geometry& geometry : kGeometries) cases.push_back({geometry, Recipe::kMxfp4});
  for (const int i : {0, 2}) cases.push_back({kGeometries[i], Recipe::kNvfp4});
  return cases;
}

// A layer, two batches and what the plain path says about them. Rows of the plain path do not
// depend on each other, so the first rows of an answer are the answer for the first rows.
struct Truth {
  Truth(const Case& c, int32_t experts)
      : host(testing::MakeRandomLayer({.hidden_size = c.geometry.hidden,
                                       .intermediate_size = c.geometry.intermediate,
                                       .num_experts = experts,
                                       .top_k = c.geometry.top_k,
                                       .recipe = c.recipe,
                                       .swiglu_limit = c.geometry.limit},
                                      61)) {
    FusedLayer one(host, kMaxTokens, c.geometry.top_k);
    for (const Routing routing : {Routing::kUniform, Routing::kSkewed}) {
      batches.push_back(
          testing::MakeRandomBatch(host.spec, kMaxTokens, c.geometry.top_k, routing, 62));
      answers.push_back(one.RunPlain(batches.back()));
    }
  }

  HostLayer host;
  std::vector<HostBatch> batches;
  std::vector<std::vector<float>> answers;
};

class EpMoeGeometryTest : public testing::GpuTest,
                          public ::testing::WithParamInterface<std::tuple<Case, EpSite>> {
 protected:
  void SetUp() override {
    testing::GpuTest::SetUp();
    if (IsSkipped()) return;
    const std::string reason = testing::WhyNot(std::get<1>(GetParam()));
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  // The last one is kept: tests of one geometry follow each other.
  static const Truth& TruthOf(const Case& c, int32_t experts) {
    const std::string key = absl::StrCat(c.Name(), " ", experts);
    if (truth_ == nullptr || key != truth_key_) {
      truth_.reset();
      truth_ = std::make_unique<Truth>(c, experts);
      truth_key_ = key;
    }
    return *truth_;
  }
  static void TearDownTestSuite() { truth_.reset(); }

  static std::unique_ptr<Truth> truth_;
  static std::string truth_key_;
};

std::unique_ptr<Truth> EpMoeGeometryTest::truth_;
std::string EpMoeGeometryTest::truth_key_;

INSTANTIATE_TEST_SUITE_P(Ranks, EpMoeGeometryTest,
                         ::testing::Combine(::testing::ValuesIn(Cases()),
                                            ::testing::ValuesIn(testing::kEpSites)),
                         [](const auto& info) {
                           const EpSite& site = std::get<1>(info.param);
                           return absl::StrCat(std::get<0>(info.param).Name(), "_",
                                               testing::RankModeName(site.mode), site.num_ranks);
                         });

// Rows a rank: few, many, uneven, all on one.
std::vector<std::vector<int32_t>> Mixes(int num_ranks) {
  std::vector<std::vector<int32_t>> mixes;
  for (const int32_t each : {1, 8, 64, kMaxTokens / num_ranks}) {
    mixes.emplace_back(num_ranks, each);
  }
  mixes.emplace_back(num_ranks, 0);
  mixes.back().back() = 1000;
  std::vector<int32_t> uneven(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) uneven[rank] = rank * 37 % 101;
  mixes.push_back(std::move(uneven));
  return mixes;
}

TEST_P(EpMoeGeometryTest, AgreesWithThePlainPath) {
  const auto& [c, site] = GetParam();
  const int32_t folds = site.mode == testing::RankMode::kDeviceEach ? site.num_ranks : 1;
  const Truth& truth = TruthOf(c, c.geometry.experts * folds);
  const auto group = testing::MakeGroup(
      site, truth.host, testing::PlacementFor(truth.host.spec.num_experts, site.num_ranks),
      {kMaxTokens, c.geometry.top_k});
  ASSERT_NE(group, nullptr);
  for (size_t b = 0; b < truth.batches.size(); ++b) {
    for (const std::vector<int32_t>& mix : Mixes(site.num_ranks)) {
      const auto batches = testing::SplitRows(truth.batches[b], c.geometry.hidden, mix);
      const std::vector<uint8_t> first = testing::Joined(group->Run(batches));
      const std::vector<float> actual = testing::AsFloats(first, DType::kBf16);
      const std::vector<double> expected(truth.answers[b].begin(),
                                         truth.answers[b].begin() + actual.size());
      EXPECT_LT(reference::RelL2(actual, expected), kBound) << "T = " << absl::StrJoin(mix, " ");
      EXPECT_EQ(testing::FirstDifference(first, testing::Joined(group->Run(batches))), -1)
          << "T = " << absl::StrJoin(mix, " ") << ": second run";
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace expertd
