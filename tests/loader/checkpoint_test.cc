#include "loader/checkpoint.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kShard0;
using testing::kShard1;
using ::testing::Not;
using testing::SafetensorsBytes;
using testing::TempDir;
using testing::TestCheckpoint;
using testing::TestTensor;
using testing::WriteFile;

class CheckpointTest : public ::testing::Test {
 protected:
  absl::StatusOr<Checkpoint> Open(const TestCheckpoint& checkpoint,
                                  const CheckpointOptions& options = {}) {
    checkpoint.Write(dir_.path());
    return Checkpoint::Open(dir_.path(), options);
  }

  // The whole message of a checkpoint that must be refused.
  std::string Refusal(const TestCheckpoint& checkpoint, const CheckpointOptions& options = {}) {
    const auto opened = Open(checkpoint, options);
    EXPECT_FALSE(opened.ok()) << "accepted";
    return std::string(opened.status().message());
  }

  TempDir dir_;
};

fs::path Golden(const std::string& name) {
  return fs::path(EXPERTD_TEST_VECTORS) / name / "checkpoint";
}

std::string GoldenRefusal(const std::string& name) {
  return std::string(Checkpoint::Open(Golden(name)).status().message());
}

// --- families

TEST_F(CheckpointTest, WellFormedMxfp4IsServed) {
  const auto checkpoint = Open(TestCheckpoint::Mxfp4());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->family(), "deepseek-v4 (mxfp4)");
  ASSERT_EQ(checkpoint->layers().size(), 2u);
  const LayerSpec expected{.layer = 0,
                           .hidden_size = 64,
                           .intermediate_size = 32,
                           .num_experts = 2,
                           .top_k = 2,
                           .recipe = Recipe::kMxfp4,
                           .swiglu_limit = 10.0f};
  EXPECT_EQ(checkpoint->layers()[0], expected);
  EXPECT_EQ(checkpoint->ignored_tensors(), 2);
  EXPECT_EQ(checkpoint->model_name(), dir_.path().filename().string());
  EXPECT_EQ(checkpoint->Describe(1, 0, Matrix::kDown),
            absl::StrCat("tensor layers.1.ffn.experts.0.w2.weight in ", kShard1));
}

TEST_F(CheckpointTest, WellFormedNvfp4IsServedAndKeepsItsInputScales) {
  const auto checkpoint = Open(TestCheckpoint::Nvfp4());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->family(), "deepseek-v4 (nvfp4)");
  const MatrixLocation& location = checkpoint->Locate(0, 1, Matrix::kUp);
  EXPECT_EQ(location.second_level.bytes, 4u);
  EXPECT_EQ(location.input_scale.bytes, 4u);
}

TEST_F(CheckpointTest, ModelPrefixMayBePresent) {
  TestCheckpoint plain = TestCheckpoint::Mxfp4(), prefixed = plain;
  prefixed.shards.clear();
  prefixed.index.clear();
  for (const auto& [file, tensors] : plain.shards) {
    for (const auto& [name, tensor] : tensors) {
      prefixed.shards[file][absl::StrCat("model.", name)] = tensor;
      prefixed.index[absl::StrCat("model.", name)] = file;
    }
  }
  const auto checkpoint = Open(prefixed);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(checkpoint->Describe(0, 0, Matrix::kGate),
              HasSubstr("model.layers.0.ffn.experts.0.w1.weight"));
}

TEST_F(CheckpointTest, TwoSchemesInOneCheckpointAreRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.shards[kShard0]["model.layers.0.mlp.experts.0.gate_proj.weight"] = {
      "U8", {1}, std::string(1, '\0')};
  checkpoint.index["model.layers.0.mlp.experts.0.gate_proj.weight"] = kShard0;
  EXPECT_THAT(Refusal(checkpoint),
              AllOf(HasSubstr("model.layers.0.mlp.experts.0.gate_proj.weight"),
                    HasSubstr("found another scheme"), HasSubstr("expected one for all")));
}

TEST(GoldenCheckpointTest, DeepSeekV4Nvfp4HasAnMxfp4MtpLayer) {
  const auto checkpoint = Checkpoint::Open(Golden("v4-nvfp4"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->family(), "deepseek-v4 (nvfp4, mtp mxfp4)");
  ASSERT_EQ(checkpoint->layers().size(), 3u);
  EXPECT_EQ(checkpoint->layers()[2].layer, 2);  // mtp.0 is num_hidden_layers + 0
  EXPECT_EQ(checkpoint->layers()[2].recipe, Recipe::kMxfp4);
  EXPECT_EQ(checkpoint->layers()[1].recipe, Recipe::kNvfp4);
  EXPECT_THAT(checkpoint->Describe(2, 5, Matrix::kUp),
              HasSubstr("tensor mtp.0.ffn.experts.5.w3.weight in "));
}

TEST(GoldenCheckpointTest, LosslessCastIsServed) {
  const auto checkpoint = Checkpoint::Open(Golden("v4-nvfp4-pow2"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->family(), "deepseek-v4 (nvfp4)");
}

TEST(GoldenCheckpointTest, Qwen3Nvfp4IsServedWithoutAClamp) {
  const auto checkpoint = Checkpoint::Open(Golden("qwen3-nvfp4"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->family(), "modelopt (nvfp4)");
  const LayerSpec& spec = checkpoint->layers().at(0);
  EXPECT_EQ(spec.hidden_size, 192);
  EXPECT_EQ(spec.intermediate_size, 128);
  EXPECT_EQ(spec.num_experts, 4);
  EXPECT_EQ(spec.swiglu_limit, 0);
}

TEST(GoldenCheckpointTest, OtherFp4FamiliesAreRefusedByName) {
  EXPECT_THAT(GoldenRefusal("ct-nvfp4"),
              HasSubstr("compressed-tensors (nvfp4-pack-quantized), which is not served yet"));
  EXPECT_THAT(GoldenRefusal("ct-mxfp4"),
              HasSubstr("compressed-tensors (mxfp4-pack-quantized), which is not served yet"));
  EXPECT_THAT(GoldenRefusal("gptoss-mxfp4"), HasSubstr("gpt-oss, which is not served yet"));
}

TEST_F(CheckpointTest, Bf16ExpertsAreRefusedInOneLine) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  for (auto& [file, tensors] : checkpoint.shards) {
    for (auto& [name, tensor] : tensors) {
      if (!name.ends_with(".weight") || name.find("experts") == std::string::npos) continue;
      const bool down = name.find("w2") != std::string::npos;
      tensor = {"BF16", down ? std::vector<int64_t>{64, 32} : std::vector<int64_t>{32, 64},
                std::string(64 * 32 * 2, '\0')};
    }
  }
  EXPECT_THAT(Refusal(checkpoint),
              AllOf(HasSubstr("1 problem\n"), HasSubstr("routed experts: found BF16"),
                    HasSubstr("[32, 64]"), HasSubstr("expected FP4")));
}

TEST_F(CheckpointTest, CheckpointWithoutExpertsIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.shards = {{"model.safetensors", {{"lm_head.weight", {"U8", {1}, "x"}}}}};
  checkpoint.index.clear();
  EXPECT_THAT(Refusal(checkpoint), HasSubstr("routed experts: found none, expected tensors such"));
}

TEST_F(CheckpointTest, FusedOrUnknownExpertTensorsAreRefusedWithAnExample) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.shards = {
      {"model.safetensors",
       {{"model.layers.0.mlp.experts.gate_up_proj", {"BF16", {1, 2}, std::string(4, '\0')}}}}};
  checkpoint.index.clear();
  EXPECT_THAT(Refusal(checkpoint), AllOf(HasSubstr("model.layers.0.mlp.experts.gate_up_proj"),
                                         HasSubstr("BF16 [1, 2]"), HasSubstr("expected an FP4")));
}

TEST_F(CheckpointTest, ExpertDtypeThatContradictsTheTensorsIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.EditConfig("\"fp4\"", "\"fp8\"");
  EXPECT_THAT(Refusal(checkpoint), HasSubstr("expert_dtype: found fp8, expected fp4"));
}

// --- tensors

TEST_F(CheckpointTest, WrongShapeNamesTensorFileAndBothShapes) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.Find("layers.1.ffn.experts.1.w3.weight") = {"I8", {32, 16}, std::string(512, '\0')};
  EXPECT_THAT(Refusal(checkpoint),
              HasSubstr(absl::StrCat("tensor layers.1.ffn.experts.1.w3.weight in ", kShard1,
                                     ": shape: found [32, 16], expected [32, 32]")));
}

TEST_F(CheckpointTest, WrongScaleShapeIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.Find("layers.0.ffn.experts.0.w2.scale") = {"F8_E8M0", {64, 2}, std::string(128, '\0')};
  EXPECT_THAT(Refusal(checkpoint), HasSubstr("w2.scale in model-00001-of-00002.safetensors: shape: "
                                             "found [64, 2], expected [64, 1]"));
}

TEST_F(CheckpointTest, WrongDtypeNamesBoth) {
  TestCheckpoint checkpoint = TestCheckpoint::Nvfp4();
  checkpoint.Find("layers.0.ffn.experts.1.w1.weight_scale").dtype = "F8_E5M2";
  checkpoint.Find("layers.0.ffn.experts.1.w1.weight_scale_2") = {"BF16", {}, "xx"};
  EXPECT_THAT(Refusal(checkpoint),
              AllOf(HasSubstr("w1.weight_scale in model-00001-of-00002.safetensors: dtype: found "
                              "F8_E5M2, expected F8_E4M3"),
                    HasSubstr("w1.weight_scale_2 in model-00001-of-00002.safetensors: dtype: found "
                              "BF16, expected F32")));
}

TEST_F(CheckpointTest, OneWeightOfAnotherDtypeIsRefusedByName) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.Find("layers.0.ffn.experts.1.w1.weight").dtype = "F8_E4M3";
  EXPECT_THAT(Refusal(checkpoint), HasSubstr("dtype: found F8_E4M3, expected U8 or I8"));
}

TEST_F(CheckpointTest, ScalarsMayHaveOneDimension) {
  TestCheckpoint checkpoint = TestCheckpoint::Nvfp4();
  checkpoint.Find("layers.0.ffn.experts.1.w1.weight_scale_2").shape = {1};
  EXPECT_TRUE(Open(checkpoint).ok());
}

TEST_F(CheckpointTest, InputScalesMayBeAbsent) {
  TestCheckpoint checkpoint = TestCheckpoint::Nvfp4();
  checkpoint.Remove("layers.0.ffn.experts.1.w1.input_scale");
  const auto opened = Open(checkpoint);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->Locate(0, 1, Matrix::kGate).input_scale.file, -1);
}

TEST_F(CheckpointTest, EveryMissingPartIsListed) {
  TestCheckpoint checkpoint = TestCheckpoint::Nvfp4();
  checkpoint.Remove("layers.0.ffn.experts.0.w1.weight");
  checkpoint.Remove("layers.0.ffn.experts.1.w3.weight_scale");
  checkpoint.Remove("layers.1.ffn.experts.1.w2.weight_scale_2");
  EXPECT_THAT(
      Refusal(checkpoint),
      AllOf(
          HasSubstr("3 problems\n"),
          HasSubstr("tensor layers.0.ffn.experts.0.w1.weight: missing, expected U8 or I8 [32, 32]"),
          HasSubstr("tensor layers.0.ffn.experts.1.w3.weight_scale: missing, expected F8_E4M3 "
                    "[32, 4]"),
          HasSubstr("tensor layers.1.ffn.experts.1.w2.weight_scale_2: missing, expected F32 []")));
}

TEST_F(CheckpointTest, MissingExpertIsToldOnce) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  for (const char* w : {"w1", "w2", "w3"}) {
    for (const char* part : {"weight", "scale"}) {
      checkpoint.Remove(absl::StrCat("layers.1.ffn.experts.1.", w, ".", part));
    }
  }
  EXPECT_THAT(Refusal(checkpoint),
              AllOf(HasSubstr("1 problem\n"),
                    HasSubstr("layer 1: experts 1: missing with all their tensors, expected "
                              "n_routed_experts = 2")));
  CheckpointOptions options;
  options.experts = {0};
  EXPECT_TRUE(Open(checkpoint, options).ok());
}

TEST_F(CheckpointTest, ExpertBeyondTheConfiguredCountIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.EditConfig("\"n_routed_experts\": 2", "\"n_routed_experts\": 1");
  checkpoint.EditConfig("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 1");
  EXPECT_THAT(Refusal(checkpoint),
              HasSubstr("expert: found 1, expected below n_routed_experts = 1"));
}

TEST_F(CheckpointTest, ScaleOfTheOtherRecipeIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  const std::string name = "layers.0.ffn.experts.0.w1.weight_scale_2";
  checkpoint.shards[kShard0][name] = {"F32", {}, "1234"};
  checkpoint.index[name] = kShard0;
  EXPECT_THAT(Refusal(checkpoint),
              HasSubstr(name + ": found in a layer that is otherwise mxfp4, expected none"));
}

TEST_F(CheckpointTest, ManyProblemsAreBoundedAndCounted) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  for (int e = 2; e < 102; ++e) {
    const std::string name = absl::StrCat("layers.0.ffn.experts.", e, ".w1.scale");
    checkpoint.shards[kShard0][name] = {"U8", {1}, "x"};
    checkpoint.index[name] = kShard0;
  }
  EXPECT_THAT(Refusal(checkpoint), AllOf(HasSubstr("100 problems"), HasSubstr("and 50 more")));
}

// --- layers

TEST_F(CheckpointTest, MissingLayerInTheServedRangeIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.EditConfig("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 5");
  EXPECT_THAT(Refusal(checkpoint),
              AllOf(HasSubstr("layers 2-4: no routed experts"),
                    HasSubstr("expected them in every layer from 0 to 4"), HasSubstr("--layers")));
  CheckpointOptions options;
  options.first_layer = 1;
  options.last_layer = 1;
  const auto part = Open(checkpoint, options);
  ASSERT_TRUE(part.ok()) << part.status();
  ASSERT_EQ(part->layers().size(), 1u);
  EXPECT_EQ(part->layers()[0].layer, 1);
  options.last_layer = 2;
  EXPECT_THAT(Refusal(checkpoint, options), HasSubstr("layers 2: no routed experts"));
}

TEST_F(CheckpointTest, RangeOutsideTheModelIsRefused) {
  CheckpointOptions options;
  options.last_layer = 7;
  EXPECT_THAT(Refusal(TestCheckpoint::Mxfp4(), options),
              HasSubstr("--layers: found 0-7, expected layers from 0 to 1"));
  options.first_layer = 1;
  options.last_layer = 0;
  EXPECT_THAT(Refusal(TestCheckpoint::Mxfp4(), options), HasSubstr("--layers: found 1-0"));
}

TEST_F(CheckpointTest, DenseLayersAreNotMissing) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.shards.erase(kShard0);
  std::erase_if(checkpoint.index, [](const auto& entry) { return entry.second == kShard0; });
  EXPECT_FALSE(Open(checkpoint).ok());
  checkpoint.EditConfig("\"hidden_act\"", "\"first_k_dense_replace\": 1, \"hidden_act\"");
  const auto opened = Open(checkpoint);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->layers().size(), 1u);
}

TEST_F(CheckpointTest, LayerNumberThatWouldBeTakenForMtpIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.EditConfig("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
  EXPECT_THAT(Refusal(checkpoint),
              HasSubstr("layer: found 1, expected below num_hidden_layers = 1"));
}

TEST_F(CheckpointTest, AbsentMtpLayersAreANoteUnlessAskedFor) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.EditConfig("\"hidden_act\"", "\"num_nextn_predict_layers\": 1, \"hidden_act\"");
  const auto opened = Open(checkpoint);
  ASSERT_TRUE(opened.ok()) << opened.status();
  ASSERT_EQ(opened->notes().size(), 1u);
  EXPECT_THAT(opened->notes()[0], HasSubstr("layers 2 (multi-token prediction): not in the"));
  CheckpointOptions options;
  options.last_layer = 2;
  EXPECT_THAT(Refusal(checkpoint, options), HasSubstr("layers 2: no routed experts"));
}

// --- files

TEST_F(CheckpointTest, MissingDirectoryIsNotFound) {
  EXPECT_EQ(Checkpoint::Open(dir_.path() / "none").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, DirectoryWithoutWeightsOrConfigSaysBoth) {
  const std::string message(Checkpoint::Open(dir_.path()).status().message());
  EXPECT_THAT(message, AllOf(HasSubstr("config.json: missing, expected"),
                             HasSubstr("found neither model.safetensors.index.json nor "
                                       "model.safetensors, expected one")));
}

TEST_F(CheckpointTest, SingleFileWithoutIndexIsServed) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  auto all = checkpoint.shards[kShard0];
  all.insert(checkpoint.shards[kShard1].begin(), checkpoint.shards[kShard1].end());
  checkpoint.shards = {{"model.safetensors", all}};
  checkpoint.index.clear();
  const auto opened = Open(checkpoint);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->files().size(), 1u);
}

TEST_F(CheckpointTest, MissingShardIsRefusedWithoutCallingItsTensorsMissing) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.Write(dir_.path());
  fs::remove(dir_.path() / kShard1);
  const std::string message(Checkpoint::Open(dir_.path()).status().message());
  EXPECT_THAT(message, AllOf(HasSubstr("1 problem\n"), HasSubstr(kShard1), HasSubstr("missing")));
}

TEST_F(CheckpointTest, BrokenShardIsNamed) {
  TestCheckpoint::Mxfp4().Write(dir_.path());
  std::ofstream(dir_.path() / kShard1, std::ios::app) << "x";
  const std::string message(Checkpoint::Open(dir_.path()).status().message());
  EXPECT_THAT(message,
              AllOf(HasSubstr("1 problem\n"), HasSubstr(kShard1), HasSubstr("file length: found")));
}

TEST_F(CheckpointTest, TensorInTwoShardsIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  const std::string name = "layers.0.ffn.experts.0.w1.weight";
  checkpoint.shards[kShard1][name] = checkpoint.Find(name);
  EXPECT_THAT(Refusal(checkpoint),
              HasSubstr(absl::StrCat("tensor ", name, ": found in ", kShard0, " and ", kShard1,
                                     ", expected only in ", kShard0)));
}

TEST_F(CheckpointTest, TensorListedInTheWrongShardIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  const std::string name = "layers.0.ffn.experts.0.w1.weight";
  checkpoint.index[name] = kShard1;
  EXPECT_THAT(Refusal(checkpoint), HasSubstr(absl::StrCat("tensor ", name, ": found in ", kShard0,
                                                          ", expected only in ", kShard1)));
}

TEST_F(CheckpointTest, ListedTensorThatIsNowhereIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.index["layers.0.attn.wq.weight"] = kShard0;
  EXPECT_THAT(Refusal(checkpoint), HasSubstr(absl::StrCat("tensor layers.0.attn.wq.weight: not "
                                                          "found, expected in ",
                                                          kShard0)));
}

TEST_F(CheckpointTest, ExpertTensorThatTheIndexForgetsIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.index.erase("layers.0.ffn.experts.0.w1.weight");
  EXPECT_THAT(Refusal(checkpoint), HasSubstr("w1.weight in model-00001-of-00002.safetensors: not "
                                             "listed, expected an entry in"));
  checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.index.erase("layers.0.ffn.gate.weight");  // nobody's business
  EXPECT_TRUE(Open(checkpoint).ok());
}

TEST_F(CheckpointTest, PathTraversalInTheIndexIsRefused) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.index["layers.0.ffn.gate.weight"] = "../secret.safetensors";
  EXPECT_THAT(Refusal(checkpoint), AllOf(HasSubstr("../secret.safetensors"),
                                         HasSubstr("expected a plain file name inside")));
}

TEST_F(CheckpointTest, ConfigProblemsAndFileProblemsComeTogether) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.EditConfig("\"hidden_size\": 64", "\"hidden_size\": \"64\"");
  checkpoint.EditConfig("\"n_routed_experts\": 2, ", "");
  checkpoint.index["gone"] = kShard0;
  EXPECT_THAT(Refusal(checkpoint),
              AllOf(HasSubstr("config.json: hidden_size: found \"64\", expected a whole number"),
                    HasSubstr("n_routed_experts or num_experts or num_local_experts: missing"),
                    HasSubstr("tensor gone: not found")));
}

TEST_F(CheckpointTest, PipeInsteadOfAShardDoesNotHang) {
  TestCheckpoint::Mxfp4().Write(dir_.path());
  fs::remove(dir_.path() / kShard1);
  ASSERT_EQ(::mkfifo((dir_.path() / kShard1).c_str(), 0600), 0);
  const std::string message(Checkpoint::Open(dir_.path()).status().message());
  EXPECT_THAT(message, HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace expertd
