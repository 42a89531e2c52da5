#include "server/random_request.h"

#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/fake_server.h"

namespace expertd {
namespace {

using testing::SmallLayer;

template <typename T>
std::vector<T> Decode(const std::string& bytes) {
  EXPECT_EQ(bytes.size() % sizeof(T), 0u);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

TEST(RandomRequestTest, TheShapesFitTheLayer) {
  const auto request = MakeRandomRequest(SmallLayer(), {.tokens = 5, .dtype = DType::kF32});
  EXPECT_EQ(request.num_tokens(), 5);
  EXPECT_EQ(request.hidden_size(), 64);
  EXPECT_EQ(request.top_k(), 2);
  EXPECT_EQ(request.hidden_states().size(), 5u * 64 * 4);
  EXPECT_EQ(request.expert_ids().size(), 5u * 2 * 4);
  EXPECT_EQ(request.routing_weights().size(), 5u * 2 * 4);
}

TEST(RandomRequestTest, HiddenStatesFillTheirRange) {
  const auto request = MakeRandomRequest(SmallLayer(), {.tokens = 64, .dtype = DType::kF32});
  const auto values = Decode<float>(request.hidden_states());
  float low = 0, high = 0;
  for (const float value : values) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  EXPECT_GE(low, -2.0f);
  EXPECT_LT(low, -1.9f);
  EXPECT_LT(high, 2.0f);
  EXPECT_GT(high, 1.9f);
}

TEST(RandomRequestTest, ATokensExpertsDifferAndItsWeightsAddUpToOne) {
  const auto request = MakeRandomRequest(SmallLayer(), {.tokens = 100, .top_k = 8});
  const auto ids = Decode<int32_t>(request.expert_ids());
  const auto weights = Decode<float>(request.routing_weights());
  for (size_t t = 0; t < 100; ++t) {
    const std::set<int32_t> experts(ids.begin() + t * 8, ids.begin() + (t + 1) * 8);
    EXPECT_EQ(experts.size(), 8u);
    EXPECT_EQ(*experts.begin(), 0);
    EXPECT_EQ(*experts.rbegin(), 7);
    float sum = 0;
    for (size_t k = 0; k < 8; ++k) {
      EXPECT_GT(weights[t * 8 + k], 0.0f);
      sum += weights[t * 8 + k];
    }
    EXPECT_NEAR(sum, 1.0f, 1e-5f);
  }
}

TEST(RandomRequestTest, EveryExpertIsChosenAtTimes) {
  const auto request = MakeRandomRequest(SmallLayer(), {.tokens = 200});
  const auto ids = Decode<int32_t>(request.expert_ids());
  EXPECT_EQ(std::set<int32_t>(ids.begin(), ids.end()).size(), 8u);
}

TEST(RandomRequestTest, MoreRoutesThanExpertsRepeatSomeOfThem) {
  v1::LayerInfo layer = SmallLayer();
  layer.set_num_experts(3);
  const auto request = MakeRandomRequest(layer, {.tokens = 4, .top_k = 7});
  for (const int32_t id : Decode<int32_t>(request.expert_ids())) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, 3);
  }
}

TEST(RandomRequestTest, TheSeedDecidesEveryByte) {
  const auto bytes = [](uint64_t seed) {
    return MakeRandomRequest(SmallLayer(), {.tokens = 3, .seed = seed}).SerializeAsString();
  };
  EXPECT_EQ(bytes(5), bytes(5));
  EXPECT_NE(bytes(5), bytes(6));
}

}  // namespace
}  // namespace expertd
