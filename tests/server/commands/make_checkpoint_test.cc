#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "config/exit_codes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/checkpoint.h"
#include "loader/checkpoint_writer.h"
#include "server/commands/commands.h"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;
using ::testing::internal::CaptureStderr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStderr;
using ::testing::internal::GetCapturedStdout;

class MakeCheckpointTest : public ::testing::Test {
 protected:
  // Runs `expertd make-checkpoint DIR arguments` and returns the exit code; stdout and stderr are
  // kept.
  int Run(std::vector<std::string> arguments) {
    int exit_code = -1;
    CLI::App app;
    AddMakeCheckpointCommand(app, &exit_code);
    arguments.insert(arguments.begin(), {"make-checkpoint", dir().string()});
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants a vector
    CaptureStdout();
    CaptureStderr();
    app.parse(arguments);
    out_ = GetCapturedStdout();
    err_ = GetCapturedStderr();
    return exit_code;
  }

  std::filesystem::path dir() const { return temp_.path() / "checkpoint"; }

  testing::TempDir temp_;
  std::string out_;
  std::string err_;
};

TEST_F(MakeCheckpointTest, TheTinyPresetIsServable) {
  ASSERT_EQ(Run({}), exit_codes::kOk) << err_;
  EXPECT_THAT(out_, HasSubstr("deepseek-v4, mxfp4: H 256, I 128, E 8 (8 written), K 2, 2 layers"));
  EXPECT_THAT(out_, HasSubstr("98 tensors in 1 shard,"));
  EXPECT_TRUE(Checkpoint::Open(dir()).ok());
}

TEST_F(MakeCheckpointTest, EveryPresetIsServableWithFewExpertsAndOneLayer) {
  for (const CheckpointPreset& preset : CheckpointPresets()) {
    ASSERT_EQ(Run({"--preset", std::string(preset.name), "--layers", "3", "--experts", "1"}),
              exit_codes::kOk)
        << preset.name << err_;
    CheckpointOptions options;
    options.first_layer = options.last_layer = 3;
    const auto checkpoint = Checkpoint::Open(dir(), options);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const LayerSpec& spec = checkpoint->layers().front();
    EXPECT_EQ(spec.hidden_size, preset.hidden_size) << preset.name;
    EXPECT_EQ(spec.intermediate_size, preset.intermediate_size) << preset.name;
    EXPECT_EQ(spec.recipe, preset.recipe) << preset.name;
    std::filesystem::remove_all(dir());
  }
}

TEST_F(MakeCheckpointTest, FlagsChangeThePreset) {
  ASSERT_EQ(Run({"--recipe", "nvfp4", "--hidden", "320", "--intermediate", "96", "--experts", "5",
                 "--top-k", "3", "--swiglu-limit", "7", "--layers", "0-2", "--mtp-layers", "1",
                 "--shard-size", "100KB"}),
            exit_codes::kOk)
      << err_;
  const auto checkpoint = Checkpoint::Open(dir());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->layers().size(), 4u);
  const LayerSpec expected = {.layer = 2,
                              .hidden_size = 320,
                              .intermediate_size = 96,
                              .num_experts = 5,
                              .top_k = 3,
                              .recipe = Recipe::kNvfp4,
                              .swiglu_limit = 7};
  EXPECT_EQ(checkpoint->layers()[2], expected);
  EXPECT_EQ(checkpoint->layers()[3].recipe, Recipe::kMxfp4);
  EXPECT_GT(checkpoint->files().size(), 3u);
}

TEST_F(MakeCheckpointTest, ABrokenOneSaysSoAndIsNotServable) {
  ASSERT_EQ(Run({"--break", "missing-expert"}), exit_codes::kOk) << err_;
  EXPECT_THAT(out_, HasSubstr("broken on purpose: one expert is not there"));
  EXPECT_FALSE(Checkpoint::Open(dir()).ok());
}

TEST_F(MakeCheckpointTest, WrongFlagsAreAUsageErrorAndWriteNothing) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--preset", "huge"}, "preset: got huge"},
      {{"--layers", "3-1"}, "--layers: got 3-1"},
      {{"--layers", "0-99999999"}, "--layers: got 0-99999999"},
      {{"--shard-size", "64XB"}, "--shard-size: got 64XB"},
      {{"--shard-size", "99999999999GB"}, "--shard-size: got 99999999999GB"},
      {{"--break", "everything"}, "--break: got everything"},
      {{"--hidden", "33"}, "hidden size: got 33"},
      {{"--preset", "qwen3", "--recipe", "mxfp4"}, "recipe: got mxfp4 with style qwen3"},
  };
  for (const auto& [arguments, message] : cases) {
    EXPECT_EQ(Run(arguments), exit_codes::kUsage) << message;
    EXPECT_THAT(err_, HasSubstr(message));
    EXPECT_FALSE(std::filesystem::exists(dir()));
  }
}

}  // namespace
}  // namespace expertd
