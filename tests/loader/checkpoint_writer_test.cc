#include "loader/checkpoint_writer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "config/check.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/formats.h"
#include "kernels/reference/reference.h"
#include "loader/checkpoint_content.h"
#include "nlohmann/json.hpp"
#include "tests/testing/golden_checkpoint.h"

namespace expertd {
namespace {

using testing::GoldenCheckpoint;
using ::testing::HasSubstr;
using testing::ReadWholeFile;

// A directory that goes with the test.
class CheckpointWriterTest : public ::testing::Test {
 protected:
  CheckpointWriterTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "expertd-XXXXXX").string();
    EXPERTD_CHECK(mkdtemp(pattern.data()) != nullptr);
    root_ = pattern;
  }
  ~CheckpointWriterTest() override { std::filesystem::remove_all(root_); }

  // Writes into a fresh subdirectory and returns it.
  std::filesystem::path Write(CheckpointRequest request) {
    request.dir = root_ / std::to_string(next_++);
    const absl::Status status = WriteCheckpoint(request, &summary_);
    EXPECT_TRUE(status.ok()) << status;
    return request.dir;
  }

  std::string Problem(CheckpointRequest request) {
    if (request.dir.empty()) request.dir = root_ / std::to_string(next_++);
    return std::string(WriteCheckpoint(request).message());
  }

  std::filesystem::path root_;
  CheckpointSummary summary_;
  int next_ = 0;
};

CheckpointRequest Nvfp4(CheckpointStyle style) {
  CheckpointRequest request;
  request.style = style;
  request.recipe = Recipe::kNvfp4;
  return request;
}

std::map<std::string, std::string> AllFiles(const std::filesystem::path& dir) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    files[entry.path().filename().string()] = ReadWholeFile(entry.path());
  }
  return files;
}

// FNV-1a over names and bytes of a directory.
uint64_t Checksum(const std::filesystem::path& dir) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](const std::string& text) {
    for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  };
  for (const auto& [name, bytes] : AllFiles(dir)) {
    add(name);
    add(bytes);
  }
  return hash;
}

TEST_F(CheckpointWriterTest, TheBytesAreTheSameOnEveryMachine) {
  EXPECT_EQ(Checksum(Write({})), 16745994543424470718u);
  EXPECT_EQ(Checksum(Write(Nvfp4(CheckpointStyle::kDeepSeekV4))), 8593765429539906388u);
  EXPECT_EQ(Checksum(Write(Nvfp4(CheckpointStyle::kQwen3))), 5700410126755153817u);
}

TEST_F(CheckpointWriterTest, AnotherSeedGivesOtherWeights) {
  CheckpointRequest request;
  const auto one = GoldenCheckpoint(Write(request)).tensors();
  request.seed = 2;
  const auto two = GoldenCheckpoint(Write(request)).tensors();
  ASSERT_EQ(one.size(), two.size());
  for (const auto& [name, bytes] : one) EXPECT_NE(bytes, two.at(name)) << name;
}

TEST_F(CheckpointWriterTest, NoTwoMatricesAreEqual) {
  std::set<std::string> seen;
  const GoldenCheckpoint checkpoint(Write({}));
  for (const auto& [name, bytes] : checkpoint.tensors()) {
    EXPECT_TRUE(seen.insert(bytes).second) << name;
  }
}

TEST_F(CheckpointWriterTest, AnExpertDoesNotDependOnWhatElseIsWritten) {
  CheckpointRequest request;
  const auto whole = GoldenCheckpoint(Write(request)).tensors();
  request.layers = {1};
  request.experts = {3, 5};
  request.shard_bytes = 1;
  const auto part = GoldenCheckpoint(Write(request)).tensors();
  EXPECT_EQ(part.size(), 1u + 2 * 6);
  for (const auto& [name, bytes] : part) EXPECT_EQ(bytes, whole.at(name)) << name;
}

TEST_F(CheckpointWriterTest, ShardsCloseAfterTheirSizeAndTheIndexListsThem) {
  CheckpointRequest request;
  request.shard_bytes = 40'000;
  const std::filesystem::path dir = Write(request);
  EXPECT_GT(summary_.num_shards, 3);
  const auto index = nlohmann::json::parse(ReadWholeFile(dir / "model.safetensors.index.json"));
  EXPECT_EQ(index.at("weight_map").size(), static_cast<size_t>(summary_.num_tensors));
  uint64_t bytes = 0;
  int shards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    if (entry.path().extension() != ".safetensors") continue;
    ++shards;
    bytes += entry.file_size();
    const std::string file = ReadWholeFile(entry.path());
    EXPECT_EQ(static_cast<uint8_t>(file[0]) % 8, 0) << "header length is a multiple of 8";
  }
  EXPECT_EQ(shards, summary_.num_shards);
  EXPECT_EQ(bytes, summary_.bytes);
}

TEST_F(CheckpointWriterTest, DeepSeekV4NamesAndTypes) {
  CheckpointRequest request;
  request.num_mtp_layers = 1;
  const auto tensors = GoldenCheckpoint(Write(request)).tensors();
  EXPECT_EQ(tensors.at("layers.1.ffn.experts.7.w3.weight").size(), 128u * 256 / 2);
  EXPECT_EQ(tensors.at("layers.1.ffn.experts.7.w3.scale").size(), 128u * 256 / 32);
  EXPECT_EQ(tensors.at("mtp.0.ffn.experts.0.w2.weight").size(), 256u * 128 / 2);
  EXPECT_EQ(tensors.size(), 3 * (1 + 8 * 6u));
}

TEST_F(CheckpointWriterTest, AnNvfp4CheckpointKeepsItsMtpLayersInMxfp4) {
  CheckpointRequest request = Nvfp4(CheckpointStyle::kDeepSeekV4);
  request.num_mtp_layers = 2;
  const auto tensors = GoldenCheckpoint(Write(request)).tensors();
  EXPECT_EQ(tensors.count("layers.0.ffn.experts.0.w1.weight_scale_2"), 1u);
  EXPECT_EQ(tensors.count("mtp.1.ffn.experts.0.w1.weight_scale_2"), 0u);
  EXPECT_EQ(tensors.count("mtp.1.ffn.experts.0.w1.scale"), 1u);
}

TEST_F(CheckpointWriterTest, Qwen3NamesAndConfig) {
  const std::filesystem::path dir = Write(Nvfp4(CheckpointStyle::kQwen3));
  const auto tensors = GoldenCheckpoint(dir).tensors();
  for (const char* part : {"weight", "weight_scale", "weight_scale_2", "input_scale"}) {
    EXPECT_EQ(tensors.count(std::string("model.layers.0.mlp.experts.2.down_proj.") + part), 1u);
  }
  const auto config = nlohmann::json::parse(ReadWholeFile(dir / "config.json"));
  EXPECT_EQ(config.at("num_experts"), 8);
  EXPECT_FALSE(config.contains("swiglu_limit"));
  const auto quant = nlohmann::json::parse(ReadWholeFile(dir / "hf_quant_config.json"));
  EXPECT_EQ(quant.at("quantization").at("quant_algo"), "NVFP4");
}

// Runs the reference on unit-normal hidden states and gives the RMS of the answer.
double OutputRms(const CheckpointRequest& request, const std::filesystem::path& dir) {
  const GoldenCheckpoint checkpoint(dir);
  LayerSpec spec;
  spec.hidden_size = request.hidden_size;
  spec.intermediate_size = request.intermediate_size;
  spec.num_experts = request.num_experts;
  spec.recipe = request.recipe;
  spec.swiglu_limit = request.style == CheckpointStyle::kQwen3 ? 0 : request.swiglu_limit;
  const auto experts = checkpoint.Layer(spec, request.num_hidden_layers);
  const int32_t tokens = 4;
  std::vector<double> hidden(tokens * spec.hidden_size);
  for (size_t i = 0; i < hidden.size(); ++i) {  // sum of 12 uniforms - 6
    for (uint64_t n = 0; n < 12; ++n) {
      hidden[i] += static_cast<double>(RandomWord(7, 12 * i + n) >> 11) / 9007199254740992.0 - 0.5;
    }
  }
  std::vector<int32_t> ids;
  for (int32_t t = 0; t < tokens; ++t) ids.push_back(t % request.num_experts);
  const std::vector<float> weights(ids.size(), 1.0f);
  const auto out = reference::Forward(spec, experts, hidden, ids, weights, 1);
  double sum = 0;
  for (const double y : out) sum += y * y;
  return std::sqrt(sum / static_cast<double>(out.size()));
}

TEST_F(CheckpointWriterTest, UnitHiddenStatesGiveOutputsNearUnity) {
  for (const int64_t hidden_size : {256, 2880, 7168}) {
    for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
      for (const bool power_of_two : {false, true}) {
        CheckpointRequest request;
        request.recipe = recipe;
        request.hidden_size = hidden_size;
        request.intermediate_size = 512;
        request.num_experts = 2;
        request.layers = {0};
        request.power_of_two_scales = power_of_two;
        const double rms = OutputRms(request, Write(request));
        // Three power-of-two scales, each within a factor sqrt(2) of the one aimed at.
        EXPECT_GT(rms, 0.2) << hidden_size << " " << RecipeName(recipe);
        EXPECT_LT(rms, 3.0) << hidden_size << " " << RecipeName(recipe);
      }
    }
  }
}

TEST_F(CheckpointWriterTest, SecondLevelsOfGateAndUpDiffer) {
  CheckpointRequest request = Nvfp4(CheckpointStyle::kQwen3);
  for (const bool power_of_two : {false, true}) {
    request.power_of_two_scales = power_of_two;
    const GoldenCheckpoint checkpoint(Write(request));
    LayerSpec spec;
    spec.num_experts = request.num_experts;
    for (const auto& expert : checkpoint.Layer(spec, 2)) {
      const double ratio = expert.matrices[0].second_level / expert.matrices[1].second_level;
      EXPECT_GT(std::abs(std::log(ratio)), 0.1);
      EXPECT_LT(std::abs(std::log(ratio)), std::log(20.0));
      if (power_of_two) {
        int exponent = 0;
        EXPECT_EQ(std::frexp(expert.matrices[0].second_level, &exponent), 0.5);
      }
    }
  }
}

// Zero blocks have zero codes (of either sign) and others do not; no NaN, MXFP4 spans at most 14.
TEST_F(CheckpointWriterTest, BlocksAreAsAKernelExpectsThem) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const MatrixShape shape = {128, 2880};
    const RandomMatrix matrix(1, 0, 0, Matrix::kUp, shape, recipe, false);
    const size_t group = static_cast<size_t>(ScaleGroup(recipe));
    std::vector<uint8_t> codes(shape.in / 2);
    std::vector<uint8_t> scales(shape.in / group);
    int zero_blocks = 0;
    int smallest = 255;
    int largest = 0;
    for (int64_t row = 0; row < shape.out; ++row) {
      matrix.FillCodes(row, absl::MakeSpan(codes));
      matrix.FillScales(row, absl::MakeSpan(scales));
      for (size_t block = 0; block < scales.size(); ++block) {
        const auto first = codes.begin() + static_cast<ptrdiff_t>(block * group / 2);
        const bool zero = std::all_of(first, first + static_cast<ptrdiff_t>(group / 2),
                                      [](uint8_t pair) { return (pair & 0x77) == 0; });
        EXPECT_EQ(zero, scales[block] == 0);
        zero_blocks += zero;
        if (zero) continue;
        smallest = std::min<int>(smallest, scales[block]);
        largest = std::max<int>(largest, scales[block]);
      }
    }
    EXPECT_GT(zero_blocks, 0);
    EXPECT_LT(zero_blocks, static_cast<int>(shape.out * shape.in / group / 20));
    if (recipe == Recipe::kMxfp4) {
      EXPECT_LE(largest - smallest, 14);
    } else {
      EXPECT_LT(largest, 0x7f);
    }
  }
}

TEST_F(CheckpointWriterTest, PowerOfTwoScalesHaveNoMantissa) {
  const MatrixShape shape = {64, 4096};
  const RandomMatrix matrix(1, 0, 0, Matrix::kGate, shape, Recipe::kNvfp4, true);
  std::vector<uint8_t> scales(shape.in / 16);
  for (int64_t row = 0; row < shape.out; ++row) {
    matrix.FillScales(row, absl::MakeSpan(scales));
    for (const uint8_t scale : scales) {
      int exponent = 0;
      const float mantissa = std::frexp(DecodeE4m3(scale), &exponent);
      EXPECT_TRUE(mantissa == 0.5f || scale == 0) << static_cast<int>(scale);
    }
  }
}

TEST_F(CheckpointWriterTest, WhatCannotBeWrittenIsRefusedWithFieldFoundAndExpected) {
  const auto problem = [&](auto change) {
    CheckpointRequest request;
    change(&request);
    return Problem(request);
  };
  using R = CheckpointRequest;
  EXPECT_EQ(problem([](R* r) { r->hidden_size = 100; }),
            "hidden size: got 100, expected a multiple of 32 up to 32768");
  EXPECT_EQ(problem([](R* r) { r->num_experts = 0; }), "experts: got 0, expected 1..4096");
  EXPECT_EQ(problem([](R* r) { r->top_k = 9; }), "top-k: got 9, expected 1..8");
  EXPECT_EQ(problem([](R* r) { r->layers = {0, 2}; }), "layers: got 2, expected 0..1");
  EXPECT_EQ(problem([](R* r) { r->layers = {1, 0}; }), "layers: got 0 after 1, expected ascending");
  EXPECT_EQ(problem([](R* r) { r->layers = {}; }), "layers: got none, expected at least one");
  EXPECT_EQ(problem([](R* r) { r->experts = {8}; }), "experts: got 8, expected 0..7");
  EXPECT_EQ(problem([](R* r) { r->style = CheckpointStyle::kQwen3; }),
            "recipe: got mxfp4 with style qwen3, expected nvfp4");
  EXPECT_EQ(problem([](R* r) { r->swiglu_limit = -1; }), "swiglu limit: got -1, expected 0..1e6");
  EXPECT_EQ(problem([](R* r) { r->defect = CheckpointDefect::kZeroSecondLevel; }),
            "break zero-second-level: got recipe mxfp4, expected nvfp4");
  EXPECT_THAT(problem([](R* r) { r->defect = CheckpointDefect::kTensorInTwoShards; }),
              HasSubstr("got one shard"));
}

TEST_F(CheckpointWriterTest, ADirectoryWithFilesIsNotTouched) {
  CheckpointRequest request;
  request.dir = Write(request);
  const uint64_t before = Checksum(request.dir);
  request.seed = 2;
  EXPECT_THAT(Problem(request), HasSubstr("expected a new or empty one"));
  EXPECT_EQ(Checksum(request.dir), before);
}

TEST_F(CheckpointWriterTest, EveryDefectChangesTheFiles) {
  std::set<std::string> names;
  for (const CheckpointDefectInfo& info : CheckpointDefects()) {
    CheckpointRequest request =
        info.needs_nvfp4 ? Nvfp4(CheckpointStyle::kDeepSeekV4) : CheckpointRequest();
    request.shard_bytes = 100'000;
    const uint64_t whole = Checksum(Write(request));
    request.defect = info.defect;
    EXPECT_NE(Checksum(Write(request)), whole) << info.name;
    EXPECT_TRUE(names.insert(std::string(info.name)).second);
    EXPECT_FALSE(info.sentence.empty());
  }
}

TEST(CheckpointPresetsTest, AreThePublishedGeometries) {
  const auto flash = RequestFromPreset("flash");
  ASSERT_TRUE(flash.ok());
  EXPECT_EQ(flash->hidden_size, 4096);
  EXPECT_EQ(flash->intermediate_size, 2048);
  EXPECT_EQ(flash->num_experts, 256);
  EXPECT_EQ(flash->layers.size(), 43u);
  EXPECT_THAT(std::string(RequestFromPreset("huge").status().message()),
              HasSubstr("expected one of tiny, flash, pro, v3, gptoss-shaped, qwen3"));
}

}  // namespace
}  // namespace expertd
