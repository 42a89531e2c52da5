#include "server/validate.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "config/limits.h"
#include "gtest/gtest.h"
#include "tests/testing/test_call.h"

namespace expertd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// T 3, K 2, H 32, as bytes.
v1::ForwardRequest BytesRequest() {
  v1::ForwardRequest request;
  request.set_layer(1);
  request.set_num_tokens(3);
  request.set_hidden_size(32);
  request.set_top_k(2);
  request.set_hidden_states(std::string(3 * 32 * 2, '\x3f'));
  request.set_expert_ids(Bytes<int32_t>({0, 1, -1, 7, 3, 3}));
  request.set_routing_weights(Bytes<float>({1, 2, NAN, 4, 5, INFINITY}));
  return request;
}

void ExpectRefused(const v1::ForwardRequest& request, absl::StatusCode code,
                   const std::vector<std::string>& parts) {
  const absl::StatusOr<RequestView> view = Validate(request, TinyModel());
  ASSERT_FALSE(view.ok());
  EXPECT_EQ(view.status().code(), code);
  for (const std::string& part : parts) {
    EXPECT_THAT(std::string(view.status().message()), HasSubstr(part));
  }
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

TEST(Validate, BytesBecomeAViewOfTheMessage) {
  const v1::ForwardRequest request = BytesRequest();
  const absl::StatusOr<RequestView> view = Validate(request, TinyModel());
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->key, (BatchKey{1, DType::kBf16, DType::kBf16}));
  EXPECT_EQ(view->num_tokens, 3);
  EXPECT_EQ(view->top_k, 2);
  EXPECT_EQ(view->hidden_bytes, request.hidden_states().data());
  EXPECT_EQ(view->expert_ids, request.expert_ids().data());
  EXPECT_FALSE(view->as_numbers);
  EXPECT_EQ(view->held_bytes, 3 * 32 * 4 + 3 * 2 * 8);
}

TEST(Validate, NumbersComeBackAsNumbersAndAreF32ByDefault) {
  const v1::ForwardRequest request = NumbersRequest(2, 3, 2);
  const absl::StatusOr<RequestView> view = Validate(request, TinyModel());
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->key, (BatchKey{2, DType::kF32, DType::kF32}));
  EXPECT_TRUE(view->as_numbers);
  EXPECT_EQ(view->hidden_values, request.hidden_values().data());
}

TEST(Validate, EachFieldMayHaveItsOwnForm) {
  v1::ForwardRequest request = BytesRequest();
  request.clear_expert_ids();
  for (int32_t id : {0, 1, 2, 3, 4, -1}) request.add_expert_id_values(id);
  EXPECT_TRUE(Validate(request, TinyModel()).ok());
}

TEST(Validate, ZeroTokensNeedNoTensors) {
  v1::ForwardRequest request;
  request.set_hidden_size(32);
  request.set_top_k(1);
  EXPECT_TRUE(Validate(request, TinyModel()).ok());
  request.set_expert_ids("1234");
  ExpectRefused(request, kInvalid, {"expert_ids", "found 4 bytes", "expected 0"});
}

TEST(Validate, NoTokenCountAboveTheLimit) {
  v1::ForwardRequest request = NumbersRequest(0, 16, 1);
  EXPECT_TRUE(Validate(request, TinyModel()).ok());
  ExpectRefused(NumbersRequest(0, 17, 1), kInvalid, {"got 17 tokens, the buffer is sized for 16"});
  request.set_num_tokens(std::numeric_limits<int32_t>::max());
  ExpectRefused(request, kInvalid, {"num_tokens"});
  request.set_num_tokens(-1);
  ExpectRefused(request, kInvalid, {"num_tokens: found -1", "0 to 16"});
}

TEST(Validate, AnUnknownModelIsNamedWithTheServedOne) {
  v1::ForwardRequest request = BytesRequest();
  request.set_model("other");
  ExpectRefused(request, kNotFound, {"model: found \"other\"", "\"tiny\""});
  request.set_model("tiny");
  EXPECT_TRUE(Validate(request, TinyModel()).ok());
}

TEST(Validate, AnUnknownLayerIsNamedWithTheServedOnes) {
  v1::ForwardRequest request = BytesRequest();
  for (int32_t layer : {-1, 4, std::numeric_limits<int32_t>::max()}) {
    request.set_layer(layer);
    ExpectRefused(request, kNotFound, {"layer: found " + std::to_string(layer), "0-3"});
  }
}

TEST(Validate, LayerListsAreShort) {
  ServedModel model = TinyModel();
  model.layers.push_back({7, 32, 32, 8, 2, Recipe::kMxfp4, 0});
  EXPECT_EQ(model.LayerList(), "0-3, 7");
  EXPECT_EQ(model.Find(7)->layer, 7);
  EXPECT_EQ(model.Find(5), nullptr);
}

TEST(Validate, AWrongHiddenSizeIsRefused) {
  v1::ForwardRequest request = BytesRequest();
  for (int32_t size : {0, -32, 31, 33, 1 << 30}) {
    request.set_hidden_size(size);
    ExpectRefused(request, kInvalid, {"hidden_size: found " + std::to_string(size), "expected 32"});
  }
}

TEST(Validate, TopKIsFromOneToTheLimit) {
  v1::ForwardRequest request = BytesRequest();
  for (int32_t top_k : {0, -1, limits::kMaxTopK + 1, 1 << 30}) {
    request.set_top_k(top_k);
    ExpectRefused(request, kInvalid, {"top_k: found " + std::to_string(top_k), "1 to 32"});
  }
  EXPECT_TRUE(Validate(NumbersRequest(0, 2, limits::kMaxTopK), TinyModel()).ok());
}

TEST(Validate, ByteCountsOffByOneAreRefused) {
  for (const int change : {-1, 1}) {
    v1::ForwardRequest request = BytesRequest();
    request.mutable_hidden_states()->resize(192 + change);
    ExpectRefused(
        request, kInvalid,
        {"hidden_states: found " + std::to_string(192 + change) + " bytes", "192", "T 3 x H 32"});
    request = BytesRequest();
    request.mutable_expert_ids()->resize(24 + change);
    ExpectRefused(request, kInvalid, {"expert_ids: found", "expected 24", "T 3 x K 2"});
    request = BytesRequest();
    request.mutable_routing_weights()->resize(24 + change);
    ExpectRefused(request, kInvalid, {"routing_weights: found", "expected 24"});
  }
}

TEST(Validate, NumberCountsOffByOneAreRefused) {
  v1::ForwardRequest request = NumbersRequest(0, 3, 2);
  request.mutable_hidden_values()->RemoveLast();
  ExpectRefused(request, kInvalid, {"hidden_values: found 95 numbers", "expected 96"});
  request = NumbersRequest(0, 3, 2);
  request.add_expert_id_values(0);
  ExpectRefused(request, kInvalid, {"expert_id_values: found 7 numbers", "expected 6"});
  request = NumbersRequest(0, 3, 2);
  request.mutable_routing_weight_values()->RemoveLast();
  ExpectRefused(request, kInvalid, {"routing_weight_values: found 5 numbers", "expected 6"});
}

TEST(Validate, AMissingTensorIsRefused) {
  v1::ForwardRequest request = BytesRequest();
  request.clear_hidden_states();
  ExpectRefused(request, kInvalid, {"hidden_states: found 0 bytes", "hidden_values"});
  request = BytesRequest();
  request.clear_expert_ids();
  ExpectRefused(request, kInvalid, {"expert_ids: found 0 bytes"});
  request = BytesRequest();
  request.clear_routing_weights();
  ExpectRefused(request, kInvalid, {"routing_weights: found 0 bytes"});
}

TEST(Validate, BothFormsOfATensorAreRefused) {
  v1::ForwardRequest request = BytesRequest();
  *request.mutable_hidden_values() = NumbersRequest(0, 3, 2).hidden_values();
  ExpectRefused(request, kInvalid, {"hidden_states", "also hidden_values", "one of the two"});
  request = BytesRequest();
  *request.mutable_expert_id_values() = NumbersRequest(0, 3, 2).expert_id_values();
  ExpectRefused(request, kInvalid, {"expert_ids", "also expert_id_values"});
  request = BytesRequest();
  *request.mutable_routing_weight_values() = NumbersRequest(0, 3, 2).routing_weight_values();
  ExpectRefused(request, kInvalid, {"routing_weights", "also routing_weight_values"});
}

TEST(Validate, IdsOutsideTheExpertsAreRefusedWithTheirPlace) {
  for (const int32_t id : {-2, 8, std::numeric_limits<int32_t>::min()}) {
    v1::ForwardRequest request = BytesRequest();
    request.set_expert_ids(Bytes<int32_t>({0, 1, 2, id, 3, 3}));
    ExpectRefused(request, kInvalid,
                  {"expert_ids: found " + std::to_string(id) + " at token 1 choice 1",
                   "-1 (masked) or 0 to 7"});
  }
}

TEST(Validate, TheDtypesDecideTheByteCounts) {
  v1::ForwardRequest request = BytesRequest();
  request.set_hidden_dtype(v1::DTYPE_F32);
  ExpectRefused(request, kInvalid, {"hidden_states: found 192 bytes", "384"});
  request.mutable_hidden_states()->resize(384);
  request.set_output_dtype(v1::DTYPE_F32);
  const absl::StatusOr<RequestView> view = Validate(request, TinyModel());
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->key, (BatchKey{1, DType::kF32, DType::kF32}));
}

TEST(Validate, UnknownDtypesAreRefused) {
  v1::ForwardRequest request = BytesRequest();
  request.set_hidden_dtype(static_cast<v1::DType>(9));
  ExpectRefused(request, kInvalid, {"hidden_dtype: found 9"});
  request = BytesRequest();
  request.set_output_dtype(static_cast<v1::DType>(9));
  ExpectRefused(request, kInvalid, {"output_dtype: found 9"});
}

TEST(Validate, TheLargestValidMessageFitsTheCap) {
  const ServedModel model = TinyModel();
  v1::ForwardRequest request = NumbersRequest(3, model.max_tokens, limits::kMaxTopK);
  for (int& id : *request.mutable_expert_id_values()) id = -1;  // ten bytes each
  request.set_model(std::string(200, 'm'));
  EXPECT_LE(static_cast<int64_t>(request.ByteSizeLong()), MaxMessageBytes(model));
}

TEST(Validate, NoRequestMayBeTooLargeForProtobuf) {
  const int32_t tokens = MaxRequestTokens(int64_t{8} * 65536, 7168, int64_t{1} << 40);
  EXPECT_LT(tokens, 8 * 65536);
  ServedModel model = TinyModel();
  model.layers[0].hidden_size = 7168;
  model.max_tokens = tokens;
  EXPECT_LE(MaxMessageBytes(model), limits::kMaxMessageBytes);
  EXPECT_EQ(MaxRequestTokens(2048, 7168, limits::kMaxInflightBytes), 2048);
}

TEST(Validate, TheLargestRequestAloneFitsIntoTheInflightBytes) {
  ServedModel model = TinyModel();
  const int32_t hidden_size = static_cast<int32_t>(model.layers[0].hidden_size);
  const int64_t inflight = 100'000;
  model.max_tokens = MaxRequestTokens(1'000'000, hidden_size, inflight);
  ASSERT_GT(model.max_tokens, 0);
  const v1::ForwardRequest request = NumbersRequest(3, model.max_tokens, limits::kMaxTopK);
  const auto view = Validate(request, model);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_LE(view->held_bytes, inflight);
  EXPECT_EQ(MaxRequestTokens(1'000'000, hidden_size, 8), 0);
}

}  // namespace
}  // namespace expertd
