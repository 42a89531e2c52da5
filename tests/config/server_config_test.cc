#include "config/server_config.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Settings File(const std::string& text) {
  const auto settings = SettingsFromToml(text, "a.toml");
  EXPECT_TRUE(settings.ok()) << settings.status();
  return settings.value_or(Settings());
}

Settings Environment(const std::map<std::string, std::string>& variables) {
  return SettingsFromEnvironment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

Settings Flags(const std::map<std::string, std::string>& flags) {
  Settings settings;
  for (const auto& [name, text] : flags) {
    settings[name] = {text, Setting::Type::kText, "--" + name};
  }
  return settings;
}

// The message of what must fail.
std::string Problem(const std::vector<Settings>& layers) {
  const auto config = MergeSettings(layers);
  return config.ok() ? "no problem" : std::string(config.status().message());
}

TEST(ServerConfigTest, NothingGivenIsTheDefault) {
  const auto config = MergeSettings({});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(*config, ServerConfig());
  EXPECT_EQ(config->listen, "127.0.0.1:50061");
  EXPECT_EQ(config->batch_wait_us, 0);
}

TEST(ServerConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  // Every combination of the three sources; each source has its own value.
  for (int given = 0; given < 8; ++given) {
    std::vector<Settings> layers(3);
    int32_t expected = ServerConfig().ranks;
    if (given & 1) {
      layers[0] = File("ranks = 2");
      expected = 2;
    }
    if (given & 2) {
      layers[1] = Environment({{"EXPERTD_RANKS", "3"}});
      expected = 3;
    }
    if (given & 4) {
      layers[2] = Flags({{"ranks", "4"}});
      expected = 4;
    }
    const auto config = MergeSettings(layers);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->ranks, expected) << "sources " << given;
  }
}

TEST(ServerConfigTest, AValueThatIsOverriddenIsNotChecked) {
  EXPECT_TRUE(
      MergeSettings({Environment({{"EXPERTD_RANKS", "many"}}), Flags({{"ranks", "4"}})}).ok());
}

TEST(ServerConfigTest, EveryFieldIsReadFromEverySource) {
  const std::map<std::string, std::string> values = {
      {"checkpoint", "/m"},         {"model-name", "m"},
      {"layers", "3-10"},           {"allow-symlinks", "true"},
      {"listen", "0.0.0.0:0"},      {"address-file", "/a"},
      {"backend", "cuda"},          {"ranks", "2"},
      {"devices", "0,1"},           {"partials", "bf16"},
      {"redundant-slots", "1"},     {"threads", "5"},
      {"load-threads", "6"},        {"max-tokens-per-rank", "7"},
      {"batch-wait-us", "8"},       {"max-queued-requests", "9"},
      {"max-inflight-bytes", "10"}, {"max-stream-inflight", "11"},
      {"load-timeout-s", "12"},     {"step-timeout-ms", "13"},
      {"drain-grace-ms", "14"},     {"drain-deadline-ms", "15"},
      {"log-level", "warn"},        {"log-format", "json"}};
  std::map<std::string, std::string> environment;
  for (const ServerConfigField& field : ServerConfigFields()) {
    ASSERT_EQ(values.count(std::string(field.name)), 1u) << field.name;
    environment[EnvironmentName(field.name)] = values.at(std::string(field.name));
    EXPECT_FALSE(field.help.empty()) << field.name;
  }
  ASSERT_EQ(values.size(), ServerConfigFields().size());
  ServerConfig expected;
  expected.checkpoint = "/m";
  expected.model_name = "m";
  expected.first_layer = 3;
  expected.last_layer = 10;
  expected.allow_symlinks = true;
  expected.listen = "0.0.0.0:0";
  expected.address_file = "/a";
  expected.backend = BackendKind::kCuda;
  expected.ranks = 2;
  expected.devices = {0, 1};
  expected.partials = DType::kBf16;
  expected.redundant_slots = 1;
  expected.threads = 5;
  expected.load_threads = 6;
  expected.max_tokens_per_rank = 7;
  expected.batch_wait_us = 8;
  expected.max_queued_requests = 9;
  expected.max_inflight_bytes = 10;
  expected.max_stream_inflight = 11;
  expected.load_timeout_s = 12;
  expected.step_timeout_ms = 13;
  expected.drain_grace_ms = 14;
  expected.drain_deadline_ms = 15;
  expected.log_level = LogLevel::kWarn;
  expected.log_format = LogFormat::kJson;
  for (const Settings& source : {Flags(values), Environment(environment), File(ToToml(expected))}) {
    const auto config = MergeSettings({source});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(*config, expected);
  }
  EXPECT_TRUE(Validate(expected).ok()) << Validate(expected);
}

TEST(ServerConfigTest, PrintedConfigurationReadsBack) {
  ServerConfig config;
  EXPECT_EQ(MergeSettings({File(ToToml(config))}).value(), config);
  config.checkpoint = "/models/\"odd\" \\ name\n";
  config.first_layer = 3;
  config.log_level = LogLevel::kOff;
  EXPECT_EQ(MergeSettings({File(ToToml(config))}).value(), config);
}

TEST(ServerConfigTest, AnUnknownKeyInTheFileIsRefused) {
  const auto settings = SettingsFromToml("ranks = 2\nrank = 3\nport = 1\n", "a.toml");
  ASSERT_FALSE(settings.ok());
  EXPECT_THAT(std::string(settings.status().message()), HasSubstr("a.toml:2: rank is no option"));
  EXPECT_THAT(std::string(settings.status().message()), HasSubstr("a.toml:3: port is no option"));
}

TEST(ServerConfigTest, UnknownVariablesAreIgnored) {
  // What Kubernetes sets for a Service named expertd.
  const Settings settings = Environment({{"EXPERTD_PORT", "tcp://10.0.0.1:50061"},
                                         {"EXPERTD_SERVICE_HOST", "10.0.0.1"},
                                         {"EXPERTD_SERVICE_PORT", "50061"},
                                         {"EXPERTD_RANKS", "2"}});
  EXPECT_EQ(settings.size(), 1u);
}

TEST(ServerConfigTest, NoOptionHasTheNameOfAVariableThatKubernetesSets) {
  for (const ServerConfigField& field : ServerConfigFields()) {
    EXPECT_THAT(EnvironmentName(field.name), Not(StartsWith("EXPERTD_PORT")));
    EXPECT_THAT(EnvironmentName(field.name), Not(StartsWith("EXPERTD_SERVICE")));
  }
}

TEST(ServerConfigTest, AnEmptyVariableIsAsIfUnset) {
  EXPECT_TRUE(Environment({{"EXPERTD_RANKS", ""}}).empty());
}

TEST(ServerConfigTest, AWrongValueNamesItsOriginAndWhatIsExpected) {
  EXPECT_EQ(Problem({Flags({{"ranks", "two"}})}),
            "--ranks: got \"two\", expected an integer from 0 to 256");
  EXPECT_EQ(Problem({Environment({{"EXPERTD_BACKEND", "gpu"}})}),
            "EXPERTD_BACKEND: got \"gpu\", expected one of auto|cpu|cuda");
  EXPECT_EQ(Problem({File("\nmax-tokens-per-rank = 0")}),
            "a.toml:2: max-tokens-per-rank: got \"0\", expected an integer from 1 to 65536");
  EXPECT_EQ(Problem({Flags({{"allow-symlinks", "yes"}})}),
            "--allow-symlinks: got \"yes\", expected true or false");
}

TEST(ServerConfigTest, AWrongTypeInTheFileIsRefused) {
  EXPECT_EQ(Problem({File("ranks = \"2\"")}), "a.toml:1: ranks: got a string, expected an integer");
  EXPECT_EQ(Problem({File("checkpoint = 7")}),
            "a.toml:1: checkpoint: got an integer, expected a string");
  EXPECT_EQ(Problem({File("allow-symlinks = 1")}),
            "a.toml:1: allow-symlinks: got an integer, expected true or false");
}

TEST(ServerConfigTest, EveryProblemIsReportedAtOnce) {
  const std::string problem = Problem({File("ranks = -1"), Flags({{"threads", "x"}})});
  EXPECT_THAT(problem, HasSubstr("a.toml:1: ranks"));
  EXPECT_THAT(problem, HasSubstr("\n--threads"));
}

TEST(ServerConfigTest, NumbersAreReadStrictly) {
  for (const char* bad :
       {"", " 1", "1 ", "1.0", "1e2", "0x1", "99999999999999999999", "-1", "+1"}) {
    EXPECT_THAT(Problem({Flags({{"threads", bad}})}), HasSubstr("--threads: got")) << bad;
  }
}

TEST(ServerConfigTest, LayersAreARangeWithOpenEnd) {
  const auto layers = [](const char* text) {
    const auto config = MergeSettings({Flags({{"layers", text}})});
    EXPECT_TRUE(config.ok()) << config.status();
    return std::vector<int32_t>{config->first_layer, config->last_layer};
  };
  EXPECT_THAT(layers("3-10"), ElementsAre(3, 10));
  EXPECT_THAT(layers("3-"), ElementsAre(3, -1));
  EXPECT_THAT(layers("3"), ElementsAre(3, 3));
  EXPECT_THAT(layers(""), ElementsAre(0, -1));
  for (const char* bad : {"-", "-3", "4-3", "a-b", "3-4-5", "3--4", "0-1024", "99999999999"}) {
    EXPECT_THAT(Problem({Flags({{"layers", bad}})}), HasSubstr("--layers: got")) << bad;
  }
}

TEST(ServerConfigTest, AddressesAreHostAndPortOrASocketPath) {
  for (const char* good : {"127.0.0.1:0", "localhost:50061", "[::1]:65535", "unix:/run/x.sock"}) {
    EXPECT_EQ(MergeSettings({Flags({{"listen", good}})}).value().listen, good);
  }
  for (const char* bad : {"", "50061", ":50061", "host:", "host:65536", "host:-1", "::1:50061",
                          "unix:", "tcp://10.0.0.1:50061", "[::1]"}) {
    EXPECT_THAT(Problem({Flags({{"listen", bad}})}), HasSubstr("expected HOST:PORT")) << bad;
  }
}

TEST(ServerConfigTest, DevicesAreAListOfNumbers) {
  EXPECT_THAT(MergeSettings({Flags({{"devices", "3,0,12"}})}).value().devices,
              ElementsAre(3, 0, 12));
  for (const char* bad : {"0,", ",0", "a", "0,,1", "-1", "256"}) {
    EXPECT_THAT(Problem({Flags({{"devices", bad}})}), HasSubstr("--devices: got")) << bad;
  }
}

TEST(ValidateTest, ACheckpointIsRequired) {
  EXPECT_THAT(std::string(Validate(ServerConfig()).message()),
              HasSubstr("checkpoint: got nothing"));
}

TEST(ValidateTest, ChecksRangesOfAHandMadeStruct) {
  ServerConfig config;
  config.checkpoint = "/m";
  EXPECT_TRUE(Validate(config).ok());
  config.max_tokens_per_rank = 0;
  config.last_layer = 4;
  config.first_layer = 7;
  const std::string problem(Validate(config).message());
  EXPECT_THAT(problem, HasSubstr("max-tokens-per-rank: got \"0\""));
  EXPECT_THAT(problem, HasSubstr("layers: got \"7-4\""));
}

TEST(ValidateTest, DevicesMustFitBackendAndRanks) {
  ServerConfig config;
  config.checkpoint = "/m";
  config.devices = {0, 0};
  config.backend = BackendKind::kCpu;
  config.ranks = 3;
  const std::string problem(Validate(config).message());
  EXPECT_THAT(problem, HasSubstr("backend = cpu"));
  EXPECT_THAT(problem, HasSubstr("named twice"));
  EXPECT_THAT(problem, HasSubstr("ranks: got 3"));
}

TEST(ValidateTest, TheGraceDelayFitsIntoTheDrainDeadline) {
  ServerConfig config;
  config.checkpoint = "/m";
  config.drain_grace_ms = config.drain_deadline_ms + 1;
  EXPECT_THAT(std::string(Validate(config).message()), HasSubstr("drain-grace-ms: got 30001"));
}

TEST(ExamplesTest, EveryExampleLoadsAndIsValidWithACheckpoint) {
  int examples = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(EXPERTD_SOURCE_DIR "/config/examples")) {
    SCOPED_TRACE(entry.path().string());
    ASSERT_EQ(entry.path().extension(), ".toml");
    std::ifstream file(entry.path());
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto settings = SettingsFromToml(text, entry.path().filename().string());
    ASSERT_TRUE(settings.ok()) << settings.status();
    auto config = MergeSettings({*settings});
    ASSERT_TRUE(config.ok()) << config.status();
    if (config->checkpoint.empty()) config->checkpoint = "/m";
    EXPECT_TRUE(Validate(*config).ok()) << Validate(*config);
    EXPECT_NE(*config, ServerConfig());
    ++examples;
  }
  EXPECT_GE(examples, 3);
}

}  // namespace
}  // namespace expertd
