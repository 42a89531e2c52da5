#include "loader/inspect.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TempDir;
using testing::TestCheckpoint;

std::filesystem::path Golden(const std::string& name) {
  return std::filesystem::path(EXPERTD_TEST_VECTORS) / name / "checkpoint";
}

TEST(InspectTest, SharesOfAllRanksAreTheWholeModel) {
  InspectOptions options;
  options.num_ranks = 3;
  const InspectReport report = Inspect(Golden("v4-mxfp4"), options);
  ASSERT_TRUE(report.CanBeServed());
  ASSERT_EQ(report.ranks.size(), 3u);
  EXPECT_EQ(report.ranks[0].experts, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(report.ranks[2].experts, (std::vector<int32_t>{6, 7}));
  int64_t bytes = 0;
  for (const RankShare& share : report.ranks) bytes += share.bytes;
  // 2 layers x 8 experts x 3 matrices of 256 x 128: half a byte and 1/32 byte a weight.
  EXPECT_EQ(bytes, 2 * 8 * 3 * (256 * 128 / 2 + 256 * 128 / 32));
}

TEST(InspectTest, TextOfAGoodCheckpointSaysEverythingInAFewLines) {
  InspectOptions options;
  options.num_ranks = 2;
  options.verify = true;
  const InspectReport report = Inspect(Golden("v4-nvfp4"), options);
  const std::string text = InspectText(report);
  EXPECT_THAT(text, AllOf(HasSubstr("family     deepseek-v4 (nvfp4, mtp mxfp4)\n"),
                          HasSubstr("H 128, I 128, E 6, K 4, SwiGLU limit 10"),
                          HasSubstr("0-1 nvfp4"), HasSubstr("2 mxfp4"),
                          HasSubstr("rank 1: experts 3-5"), HasSubstr("cuda sm_90a yes"),
                          HasSubstr("cpu  any    yes"), HasSubstr("second level"),
                          HasSubstr("(not used)"), HasSubstr("verdict    can be served\n")));
}

TEST(InspectTest, JsonIsOneDocumentWithTheSameFacts) {
  InspectOptions options;
  options.num_ranks = 2;
  options.verify = true;
  const auto json = nlohmann::json::parse(InspectJson(Inspect(Golden("qwen3-nvfp4"), options)));
  EXPECT_EQ(json["family"], "modelopt (nvfp4)");
  EXPECT_EQ(json["can_be_served"], true);
  EXPECT_EQ(json["geometry"]["hidden_size"], 192);
  EXPECT_EQ(json["geometry"]["num_experts"], 4);
  EXPECT_EQ(json["layers"].size(), 2u);
  EXPECT_EQ(json["ranks"][1]["experts"], (std::vector<int>{2, 3}));
  EXPECT_EQ(json["ranks"][0]["bytes"].get<int64_t>() + json["ranks"][1]["bytes"].get<int64_t>(),
            json["expert_bytes"].get<int64_t>());
  EXPECT_EQ(json["scales"].size(), 2u);
  EXPECT_EQ(json["num_problems"], 0);
}

TEST(InspectTest, RefusedFamilyCannotBeServed) {
  const InspectReport report = Inspect(Golden("gptoss-mxfp4"), {});
  EXPECT_FALSE(report.CanBeServed());
  EXPECT_THAT(InspectText(report),
              AllOf(HasSubstr("family     gpt-oss"), HasSubstr("not served yet"),
                    HasSubstr("verdict    cannot be served: 1 problem\n")));
}

TEST(InspectTest, EverythingWrongIsToldAtOnceInBothForms) {
  TempDir dir;
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.Remove("layers.0.ffn.experts.0.w1.scale");
  checkpoint.Find("layers.1.ffn.experts.0.w1.weight").dtype = "BOOL";
  checkpoint.Write(dir.path());
  const InspectReport report = Inspect(dir.path(), {});
  EXPECT_EQ(report.problems.count(), 2);
  EXPECT_TRUE(report.ranks.empty());
  EXPECT_THAT(InspectText(report), AllOf(HasSubstr("layers.0.ffn.experts.0.w1.scale: missing"),
                                         HasSubstr("dtype: found BOOL")));
  const auto json = nlohmann::json::parse(InspectJson(report));
  EXPECT_EQ(json["can_be_served"], false);
  EXPECT_EQ(json["problems"].size(), 2u);
}

TEST(InspectTest, GeometryThatCudaCannotServeIsSaid) {
  TempDir dir;
  TestCheckpoint::Mxfp4().Write(dir.path());  // I is 32
  const InspectReport report = Inspect(dir.path(), {});
  EXPECT_TRUE(report.CanBeServed());
  EXPECT_THAT(
      InspectText(report),
      HasSubstr("cuda sm_90a no: moe_intermediate_size: found 32, expected a multiple of 64"));
}

TEST(InspectTest, VerifyFindsBadValuesThatHeadersCannotShow) {
  TempDir dir;
  TestCheckpoint checkpoint = TestCheckpoint::Nvfp4();
  checkpoint.Find("layers.0.ffn.experts.0.w1.weight_scale").data[0] = '\x7f';
  checkpoint.Find("layers.1.ffn.experts.1.w3.weight_scale_2").data =
      testing::internal::FloatBytes(-2.0f);
  checkpoint.Write(dir.path());
  InspectOptions options;
  EXPECT_TRUE(Inspect(dir.path(), options).CanBeServed());
  options.verify = true;
  const InspectReport report = Inspect(dir.path(), options);
  EXPECT_EQ(report.problems.count(), 2);
  EXPECT_TRUE(report.backends.empty()) << "no backend can serve it";
  EXPECT_THAT(InspectText(report),
              AllOf(HasSubstr("block scale [0, 0]: found NaN"),
                    HasSubstr("second-level scale: found -2, expected a finite number above 0")));
}

TEST(InspectTest, VerifyReportsRangesAndZeroBlocks) {
  TempDir dir;
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  auto& scales = checkpoint.Find("layers.0.ffn.experts.0.w1.scale").data;
  scales[0] = static_cast<char>(127 - 3);
  scales[1] = static_cast<char>(127 + 2);
  scales[2] = '\0';
  checkpoint.Find("layers.0.ffn.experts.0.w1.weight").data.replace(32, 16, 16, '\0');
  checkpoint.Write(dir.path());
  InspectOptions options;
  options.verify = true;
  const InspectReport report = Inspect(dir.path(), options);
  ASSERT_TRUE(report.CanBeServed()) << InspectText(report);
  ASSERT_EQ(report.scales.size(), 2u);
  EXPECT_EQ(report.scales[0].blocks, 2 * 3 * 64);
  EXPECT_EQ(report.scales[0].zero_blocks, 1);
  EXPECT_EQ(report.scales[0].smallest_scale, 0.125);
  EXPECT_EQ(report.scales[0].largest_scale, 4.0);
}

TEST(InspectTest, OneRankNeedsOnlyItsOwnExperts) {
  TempDir dir;
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  for (auto& [file, tensors] : checkpoint.shards) {
    std::erase_if(tensors, [](const auto& entry) {
      return entry.first.find("experts.1.") != std::string::npos;
    });
  }
  std::erase_if(checkpoint.index, [](const auto& entry) {
    return entry.first.find("experts.1.") != std::string::npos;
  });
  checkpoint.Write(dir.path());
  InspectOptions options;
  options.num_ranks = 2;
  options.rank = 0;
  options.verify = true;
  const InspectReport report = Inspect(dir.path(), options);
  EXPECT_TRUE(report.CanBeServed()) << InspectText(report);
  EXPECT_EQ(report.ranks.size(), 1u);
  options.rank = 1;
  EXPECT_FALSE(Inspect(dir.path(), options).CanBeServed());
  options.rank = 2;
  EXPECT_THAT(InspectText(Inspect(dir.path(), options)),
              HasSubstr("--rank: found 2, expected below --ranks = 2"));
}

TEST(InspectTest, MissingDirectoryIsOneProblem) {
  const InspectReport report = Inspect("/nowhere/at/all", {});
  EXPECT_EQ(report.problems.count(), 1);
  EXPECT_THAT(InspectText(report), HasSubstr("found no directory"));
}

}  // namespace
}  // namespace expertd
