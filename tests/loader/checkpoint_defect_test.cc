#include "loader/checkpoint_defect.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/checkpoint.h"
#include "loader/checkpoint_writer.h"
#include "loader/load_plan.h"
#include "loader/weight_loader.h"
#include "tests/testing/golden_checkpoint.h"
#include "tests/testing/memory_sink.h"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

using testing::GoldenCheckpoint;
using ::testing::HasSubstr;
using testing::MemorySink;
using testing::TempDir;

constexpr int32_t kRanks = 2;
constexpr char kFirstShard[] = "model-00001-of-00009.safetensors";

std::vector<uint8_t> Copy(absl::Span<const uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }

// Opens the directory and loads every expert; the sink holds them.
absl::Status OpenAndLoad(const std::filesystem::path& dir, std::unique_ptr<MemorySink>* sink) {
  const auto checkpoint = Checkpoint::Open(dir);
  if (!checkpoint.ok()) return checkpoint.status();
  const auto placement = Placement::Contiguous(checkpoint->layers().front().num_experts, kRanks);
  if (!placement.ok()) return placement.status();
  *sink = std::make_unique<MemorySink>(checkpoint->layers(), *placement, 0, kRanks);
  const LoadPlan plan = MakeLoadPlan(*checkpoint, *placement, 0, kRanks);
  LoadOptions options;
  options.num_threads = 2;
  options.deadline = absl::Now() + absl::Seconds(60);
  return LoadWeights(*checkpoint, plan, **sink, options);
}

CheckpointRequest RequestFor(const CheckpointDefectInfo& info, Recipe recipe) {
  CheckpointRequest request;
  request.recipe = recipe;
  if (info.needs_nvfp4) request.recipe = Recipe::kNvfp4;
  if (info.needs_mxfp4) request.recipe = Recipe::kMxfp4;
  request.shard_bytes = 100'000;
  request.defect = info.defect;
  return request;
}

class DefectTest : public ::testing::TestWithParam<CheckpointDefectInfo> {};

TEST_P(DefectTest, IsRefusedWithAMessageThatNamesIt) {
  // What the message must contain.
  static const std::map<std::string, std::vector<std::string>> kExpected = {
      {"missing-weight", {"layers.0.ffn.experts.0.w3.weight: missing"}},
      {"missing-scale", {"layers.0.ffn.experts.0.w3.", "scale: missing"}},
      {"missing-second-level", {"layers.0.ffn.experts.0.w3.weight_scale_2: missing"}},
      {"missing-expert", {"layer 0", "experts 0", "missing"}},
      {"missing-layer", {"layers 0", "no routed experts"}},
      {"wrong-shape", {"experts.0.w3.weight", kFirstShard, "[127, 128]", "[128, 128]"}},
      {"wrong-dtype", {"experts.0.w3.weight", kFirstShard, "F8_E4M3", "U8 or I8"}},
      {"nan-scale", {"experts.0.w3.", kFirstShard, "found NaN"}},
      {"huge-scale", {"experts.0.w3.scale", kFirstShard, "2^127", "2^-100 to 2^60"}},
      {"zero-second-level", {"experts.0.w3.weight_scale_2", kFirstShard, "found 0"}},
      {"negative-second-level", {"experts.0.w3.weight_scale_2", kFirstShard, "found -0.01"}},
      {"nan-second-level", {"experts.0.w3.weight_scale_2", kFirstShard, "found nan"}},
      {"infinite-second-level", {"experts.0.w3.weight_scale_2", kFirstShard, "found inf"}},
      {"missing-shard", {"model-00009-of-00009.safetensors: missing"}},
      {"truncated-shard", {"model-00009-of-00009.safetensors", "file length"}},
      {"trailing-bytes", {"model-00009-of-00009.safetensors", "file length"}},
      {"header-too-long", {"model-00009-of-00009.safetensors", "100000001", "100000000"}},
      {"tensor-in-two-shards", {"experts.1.w2.weight", kFirstShard, "model-00009-of-00009"}},
      {"wrong-shard-in-index", {"experts.1.w2.weight", kFirstShard, "model-00009-of-00009"}},
      {"path-traversal", {"../model-00001-of-00009.safetensors"}},
      {"config-missing-key", {"config.json", "hidden_size: missing"}},
      {"config-wrong-type", {"config.json", "hidden_size: found \"256\""}},
      {"config-absurd-number", {"moe_intermediate_size: found 1000000000000000"}},
      {"config-not-json", {"\n  config.json: found text that is not valid UTF-8 JSON"}},
  };
  const auto expected = kExpected.find(std::string(GetParam().name));
  ASSERT_NE(expected, kExpected.end());
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    TempDir dir;
    CheckpointRequest request = RequestFor(GetParam(), recipe);
    request.dir = dir.path() / "broken";
    ASSERT_TRUE(WriteCheckpoint(request).ok());
    std::unique_ptr<MemorySink> sink;
    const absl::Status status = OpenAndLoad(request.dir, &sink);
    ASSERT_FALSE(status.ok()) << "accepted";
    for (const std::string& fragment : expected->second) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(fragment));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, DefectTest, ::testing::ValuesIn(CheckpointDefects()),
                         [](const auto& info) {
                           std::string name(info.param.name);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Loads the directory and compares every matrix with what a second reader finds there.
void ExpectLoadedAsRead(const std::filesystem::path& dir, int32_t num_hidden_layers,
                        size_t num_layers) {
  std::unique_ptr<MemorySink> sink;
  const absl::Status status = OpenAndLoad(dir, &sink);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(sink->layers().size(), num_layers);
  const GoldenCheckpoint golden(dir);
  for (const LayerSpec& spec : sink->layers()) {
    const auto experts = golden.Layer(spec, num_hidden_layers);
    const int32_t slots = sink->placement().slots_per_rank();
    for (int32_t expert = 0; expert < spec.num_experts; ++expert) {
      for (int m = 0; m < kNumMatrices; ++m) {
        const MatrixId id = {expert / slots, spec.layer, expert % slots, static_cast<Matrix>(m)};
        const auto& loaded = sink->Get(id);
        EXPECT_EQ(loaded.codes, Copy(experts[expert].matrices[m].codes));
        EXPECT_EQ(loaded.scales, Copy(experts[expert].matrices[m].scales));
        EXPECT_EQ(loaded.second_level, experts[expert].matrices[m].second_level);
      }
    }
  }
}

TEST(WholeCheckpointTest, EveryFamilyLoadsTheBytesThatWereWritten) {
  for (const bool qwen : {false, true}) {
    for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
      if (qwen && recipe == Recipe::kMxfp4) continue;
      TempDir dir;
      CheckpointRequest request;
      request.dir = dir.path() / "whole";
      request.style = qwen ? CheckpointStyle::kQwen3 : CheckpointStyle::kDeepSeekV4;
      request.recipe = recipe;
      request.num_mtp_layers = qwen ? 0 : 1;
      request.shard_bytes = 50'000;
      ASSERT_TRUE(WriteCheckpoint(request).ok());
      ExpectLoadedAsRead(request.dir, request.num_hidden_layers, qwen ? 2 : 3);
    }
  }
}

TEST(WholeCheckpointTest, TheGoldenCheckpointsLoadAsASecondReaderReadsThem) {
  for (const std::string& name : testing::ServedGoldenCases()) {
    SCOPED_TRACE(name);
    const testing::GoldenCase golden = testing::LoadGoldenCase(name);
    ExpectLoadedAsRead(golden.checkpoint, golden.num_hidden_layers, name == "v4-nvfp4" ? 3 : 2);
  }
}

}  // namespace
}  // namespace expertd
