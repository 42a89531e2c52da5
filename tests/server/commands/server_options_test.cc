#include "server/commands/server_options.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "config/server_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;

// An environment variable for the life of the object.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::string& value) : name_(name) {
    ::setenv(name, value.c_str(), 1);
  }
  ~ScopedVariable() { ::unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
};

class ServerOptionsTest : public ::testing::Test {
 protected:
  // The configuration that `expertd serve ARGUMENTS` would use.
  absl::StatusOr<ServerConfig> Resolve(std::vector<std::string> arguments) {
    CLI::App app;
    ServerOptions options(app);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants a vector
    app.parse(arguments);
    print_config_ = options.print_config();
    return options.Resolve();
  }

  std::string Problem(const std::vector<std::string>& arguments) {
    const auto config = Resolve(arguments);
    return config.ok() ? "no problem" : std::string(config.status().message());
  }

  std::string File(const std::string& text) {
    const std::filesystem::path path = dir_.path() / "expertd.toml";
    testing::WriteFile(path, text);
    return path.string();
  }

  testing::TempDir dir_;
  bool print_config_ = false;
};

TEST_F(ServerOptionsTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const std::string file = File("checkpoint = '/file'\nranks = 2\nthreads = 2\n");
  ScopedVariable ranks("EXPERTD_RANKS", "3");
  ScopedVariable threads("EXPERTD_THREADS", "3");
  const auto config = Resolve({"--config", file, "--threads", "4"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->threads, 4);
  EXPECT_EQ(config->ranks, 3);
  EXPECT_EQ(config->checkpoint, "/file");
  EXPECT_EQ(config->listen, "127.0.0.1:50061");
}

TEST_F(ServerOptionsTest, TheFileMayBeNamedInTheEnvironment) {
  ScopedVariable variable("EXPERTD_CONFIG", File("checkpoint = '/file'\n"));
  EXPECT_EQ(Resolve({}).value().checkpoint, "/file");
}

TEST_F(ServerOptionsTest, TheCheckpointNeedsNoFlag) {
  EXPECT_EQ(Resolve({"/models/a"}).value().checkpoint, "/models/a");
  EXPECT_EQ(Resolve({"--checkpoint", "/models/a"}).value().checkpoint, "/models/a");
}

TEST_F(ServerOptionsTest, ASwitchCanBeTurnedOffAgain) {
  const std::string file = File("checkpoint = '/file'\nallow-symlinks = true\n");
  EXPECT_TRUE(Resolve({"--config", file})->allow_symlinks);
  EXPECT_FALSE(Resolve({"--config", file, "--no-allow-symlinks"})->allow_symlinks);
  EXPECT_TRUE(Resolve({"/m", "--allow-symlinks"})->allow_symlinks);
}

TEST_F(ServerOptionsTest, UnknownFlagsAreRefused) {
  EXPECT_THROW(Resolve({"/m", "--port", "1"}), CLI::ExtrasError);
}

TEST_F(ServerOptionsTest, WhatIsWrongIsToldWithItsOrigin) {
  const std::string file = File("ranks = 'two'\n");
  EXPECT_EQ(Problem({"/m", "--config", file}),
            file + ":1: ranks: got a string, expected an integer");
  EXPECT_THAT(Problem({"/m", "--backend", "gpu"}), HasSubstr("--backend: got \"gpu\""));
  EXPECT_THAT(Problem({}), HasSubstr("checkpoint: got nothing"));
  EXPECT_THAT(Problem({"/m", "--config", "/nonexistent.toml"}), HasSubstr("cannot open"));
  EXPECT_THAT(Problem({"/m", "--config", dir_.path().string()}), HasSubstr("cannot read"));
  EXPECT_THAT(Problem({"/m", "--config", File(std::string(2 << 20, '\n'))}),
              HasSubstr("larger than"));
}

TEST_F(ServerOptionsTest, PrintConfigNeedsNoCheckpoint) {
  const auto config = Resolve({"--print-config", "--ranks", "2"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(print_config_);
  EXPECT_EQ(Resolve({"--print-config", "--config", File(ToToml(*config))}).value(), *config);
}

}  // namespace
}  // namespace expertd
