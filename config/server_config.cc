#include "config/server_config.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/toml.h"

namespace expertd {
namespace {

// What was found and what was expected; the caller puts the field in front.
absl::Status Wrong(std::string_view found, std::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("got ", toml::Quote(found), ", expected ", std::string(expected)));
}

bool ParseInteger(std::string_view text, int64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

// An option as code sees it. `parse` also checks the range; `print` gives what `parse` reads.
struct Option {
  ServerConfigField field;
  Setting::Type type = Setting::Type::kString;
  std::function<absl::Status(std::string_view, ServerConfig*)> parse;
  std::function<std::string(const ServerConfig&)> print;
};

Option Text(std::string_view name, std::string_view value, std::string_view help,
            std::string ServerConfig::*member) {
  return {{name, value, help},
          Setting::Type::kString,
          [=](std::string_view text, ServerConfig* config) {
            config->*member = std::string(text);
            return absl::OkStatus();
          },
          [=](const ServerConfig& config) { return config.*member; }};
}

template <typename T>
Option Number(std::string_view name, std::string_view value, std::string_view help,
              T ServerConfig::*member, int64_t min, int64_t max) {
  return {{name, value, help},
          Setting::Type::kInteger,
          [=](std::string_view text, ServerConfig* config) {
            int64_t number = 0;
            if (!ParseInteger(text, &number) || number < min || number > max) {
              return Wrong(text, absl::StrCat("an integer from ", min, " to ", max));
            }
            config->*member = static_cast<T>(number);
            return absl::OkStatus();
          },
          [=](const ServerConfig& config) { return absl::StrCat(config.*member); }};
}

Option Switch(std::string_view name, std::string_view help, bool ServerConfig::*member) {
  return {
      {name, "", help, /*is_bool=*/true},
      Setting::Type::kBoolean,
      [=](std::string_view text, ServerConfig* config) {
        if (text != "true" && text != "false" && text != "1" && text != "0") {
          return Wrong(text, "true or false");
        }
        config->*member = text == "true" || text == "1";
        return absl::OkStatus();
      },
      [=](const ServerConfig& config) { return std::string(config.*member ? "true" : "false"); }};
}

// names: in the order of the enum's values, separated by |.
template <typename Enum>
Option Choice(std::string_view name, std::string_view names, std::string_view help,
              Enum ServerConfig::*member) {
  std::vector<std::string> list;
  for (size_t at = 0; at <= names.size();) {
    const size_t bar = std::min(names.find('|', at), names.size());
    list.emplace_back(names.substr(at, bar - at));
    at = bar + 1;
  }
  return {{name, names, help},
          Setting::Type::kString,
          [=](std::string_view text, ServerConfig* config) {
            const auto found = std::find(list.begin(), list.end(), text);
            if (found == list.end()) {
              return Wrong(text, absl::StrCat("one of ", std::string(names)));
            }
            config->*member = static_cast<Enum>(found - list.begin());
            return absl::OkStatus();
          },
          [=](const ServerConfig& config) { return list[static_cast<size_t>(config.*member)]; }};
}

constexpr std::string_view kLayersForm = "A-B, A- or A with 0 <= A <= B, or nothing for all";

std::string PrintLayers(const ServerConfig& config) {
  if (config.last_layer == -1 && config.first_layer == 0) return "";
  if (config.last_layer == -1) return absl::StrCat(config.first_layer, "-");
  return absl::StrCat(config.first_layer, "-", config.last_layer);
}

absl::Status ParseDevices(std::string_view text, ServerConfig* config) {
  config->devices.clear();
  if (text.empty()) return absl::OkStatus();
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    int64_t device = 0;
    if (!ParseInteger(text.substr(at, comma - at), &device) || device < 0 ||
        device >= limits::kMaxRanks) {
      return Wrong(text, absl::StrCat("device numbers from 0 to ", limits::kMaxRanks - 1,
                                      " separated by commas"));
    }
    config->devices.push_back(static_cast<int32_t>(device));
    at = comma + 1;
  }
  return absl::OkStatus();
}

absl::Status ParseListen(std::string_view text, ServerConfig* config) {
  constexpr std::string_view kForm = "HOST:PORT, [IPV6]:PORT or unix:PATH";
  if (text.substr(0, 5) == "unix:") {
    if (text.size() == 5) return Wrong(text, kForm);
  } else {
    const size_t colon = text.rfind(':');
    int64_t port = 0;
    if (colon == std::string_view::npos || colon == 0 ||
        !ParseInteger(text.substr(colon + 1), &port) || port < 0 || port > 65535) {
      return Wrong(text, kForm);
    }
    const std::string_view host = text.substr(0, colon);
    const bool bracketed = host.front() == '[' && host.back() == ']';
    if (!bracketed && host.find_first_of(":/[]") != std::string_view::npos) {
      return Wrong(text, kForm);
    }
  }
  config->listen = std::string(text);
  return absl::OkStatus();
}

// The one list of options: name, help, range. Order is that of --help and --print-config.
std::vector<Option> MakeOptions() {
  using C = ServerConfig;
  using Type = Setting::Type;
  constexpr int64_t kMs = limits::kMaxTimeoutMs;
  std::vector<Option> options = {
      Text("checkpoint", "DIR", "directory of the safetensors checkpoint", &C::checkpoint),
      Text("model-name", "NAME", "name that requests may give; empty: the directory's name",
           &C::model_name),
      {{"layers", "A-B", "serve these MoE layers only; empty: all"},
       Type::kString,
       [](std::string_view text, C* config) {
         return ParseLayers(text, &config->first_layer, &config->last_layer);
       },
       PrintLayers},
      Switch("allow-symlinks", "follow links that leave the checkpoint directory",
             &C::allow_symlinks),
      {{"listen", "ADDRESS", "HOST:PORT (port 0: any free one) or unix:PATH"},
       Type::kString,
       ParseListen,
       [](const C& config) { return config.listen; }},
      Text("address-file", "FILE", "write the bound address here once it is known",
           &C::address_file),
      Choice("backend", "auto|cpu|cuda",
             "what computes; auto: CUDA if a GPU is found, else the CPU", &C::backend),
      Number("ranks", "N", "0: one on the CPU, one a GPU with CUDA", &C::ranks, 0,
             limits::kMaxRanks),
      {{"devices", "N,N", "GPUs to use, one rank each; empty: the first of the visible ones"},
       Type::kString,
       ParseDevices,
       [](const C& config) { return absl::StrJoin(config.devices, ","); }},
      Choice("partials", "bf16|f32",
             "several GPUs: how partial rows cross; bf16 may err by 2^-8 of each", &C::partials),
      Number("redundant-slots", "N", "expert slots of a rank beyond its share, for replicas",
             &C::redundant_slots, 0, limits::kMaxExperts),
      Number("threads", "N", "CPU backend: threads of all ranks together; 0: one a core",
             &C::threads, 0, limits::kMaxThreads),
      Number("load-threads", "N", "threads that read the checkpoint; 0: one a core, at most 16",
             &C::load_threads, 0, limits::kMaxThreads),
      Number("max-tokens-per-rank", "N", "rows a rank takes a step; sizes the workspace",
             &C::max_tokens_per_rank, 1, limits::kMaxTokensPerRank),
      Number("batch-wait-us", "US", "how long a step waits for more requests; 0: never",
             &C::batch_wait_us, 0, limits::kMaxBatchWaitUs),
      Number("max-queued-requests", "N", "requests that may wait; more are refused",
             &C::max_queued_requests, 1, limits::kMaxQueuedRequests),
      Number("max-inflight-bytes", "BYTES", "request bytes held at once; more are refused",
             &C::max_inflight_bytes, 1, limits::kMaxInflightBytes),
      Number("max-stream-inflight", "N", "unanswered requests of one stream; more are refused",
             &C::max_stream_inflight, 1, limits::kMaxStreamInflight),
      Number("load-timeout-s", "S", "loading that takes longer fails", &C::load_timeout_s, 1,
             limits::kMaxLoadTimeoutS),
      Number("step-timeout-ms", "MS", "a step that takes longer is a fault", &C::step_timeout_ms, 1,
             kMs),
      Number("drain-grace-ms", "MS", "after SIGTERM: not serving, but requests are still taken",
             &C::drain_grace_ms, 0, kMs),
      Number("drain-deadline-ms", "MS", "after SIGTERM: what is in flight may finish until then",
             &C::drain_deadline_ms, 1, kMs),
      Choice("log-level", "trace|debug|info|warn|error|off",
             "the least severe level that is logged", &C::log_level),
      Choice("log-format", "text|json", "text for people, one JSON object a line for collectors",
             &C::log_format),
  };
  for (Option& option : options) option.field.default_text = option.print(ServerConfig());
  return options;
}

const std::vector<Option>& Options() {
  static const std::vector<Option> options = MakeOptions();
  return options;
}

const Option* FindOption(std::string_view name) {
  for (const Option& option : Options()) {
    if (option.field.name == name) return &option;
  }
  return nullptr;
}

std::string_view TypeName(Setting::Type type) {
  switch (type) {
    case Setting::Type::kText:
      return "text";
    case Setting::Type::kString:
      return "a string";
    case Setting::Type::kInteger:
      return "an integer";
    case Setting::Type::kBoolean:
      return "true or false";
  }
  return "?";
}

absl::Status Apply(const Option& option, const Setting& setting, ServerConfig* config) {
  if (setting.type != Setting::Type::kText && setting.type != option.type) {
    return absl::InvalidArgumentError(absl::StrCat("got ", std::string(TypeName(setting.type)),
                                                   ", expected ",
                                                   std::string(TypeName(option.type))));
  }
  return option.parse(setting.text, config);
}

absl::Status AllProblems(const std::vector<std::string>& problems) {
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
}

void CheckDevices(const ServerConfig& config, std::vector<std::string>* problems) {
  if (config.devices.empty()) return;
  if (config.backend == BackendKind::kCpu) {
    problems->push_back("devices: got GPUs together with backend = cpu, expected none");
  }
  if (std::set(config.devices.begin(), config.devices.end()).size() != config.devices.size()) {
    problems->push_back("devices: a GPU is named twice, expected one rank a device");
  }
  if (config.ranks != 0 && config.ranks != static_cast<int32_t>(config.devices.size())) {
    problems->push_back(absl::StrCat("ranks: got ", config.ranks,
                                     ", expected 0 or the number of devices (",
                                     config.devices.size(), ")"));
  }
}

}  // namespace

const std::vector<ServerConfigField>& ServerConfigFields() {
  static const std::vector<ServerConfigField> fields = [] {
    std::vector<ServerConfigField> list;
    for (const Option& option : Options()) list.push_back(option.field);
    return list;
  }();
  return fields;
}

std::string EnvironmentName(std::string_view field) {
  std::string name = "EXPERTD_";
  for (const char c : field) {
    name.push_back(c == '-' ? '_' : 'a' <= c && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c);
  }
  return name;
}

absl::Status ParseLayers(std::string_view text, int32_t* first_layer, int32_t* last_layer) {
  *first_layer = 0;
  *last_layer = -1;
  if (text.empty()) return absl::OkStatus();
  const size_t dash = text.find('-');
  int64_t first = 0;
  int64_t last = -1;
  if (!ParseInteger(text.substr(0, dash), &first)) return Wrong(text, kLayersForm);
  if (dash == std::string_view::npos) {
    last = first;
  } else if (dash + 1 < text.size()) {
    if (!ParseInteger(text.substr(dash + 1), &last) || last < 0) return Wrong(text, kLayersForm);
  }
  if (first < 0 || (last != -1 && last < first)) return Wrong(text, kLayersForm);
  if (std::max(first, last) >= limits::kMaxLayers) {
    return Wrong(text, absl::StrCat("layers below ", limits::kMaxLayers));
  }
  *first_layer = static_cast<int32_t>(first);
  *last_layer = static_cast<int32_t>(last);
  return absl::OkStatus();
}

absl::StatusOr<Settings> SettingsFromToml(std::string_view toml, std::string_view file_name) {
  const auto entries = toml::Parse(toml, file_name);
  if (!entries.ok()) return entries.status();
  Settings settings;
  std::vector<std::string> problems;
  for (const toml::Entry& entry : *entries) {
    const std::string origin =
        absl::StrCat(std::string(file_name), ":", entry.line, ": ", entry.key);
    if (FindOption(entry.key) == nullptr) {
      problems.push_back(absl::StrCat(origin, " is no option of expertd serve"));
      continue;
    }
    Setting::Type type = Setting::Type::kString;
    if (entry.type == toml::Type::kInteger) type = Setting::Type::kInteger;
    if (entry.type == toml::Type::kBoolean) type = Setting::Type::kBoolean;
    settings[entry.key] = {entry.text, type, origin};
  }
  if (auto status = AllProblems(problems); !status.ok()) return status;
  return settings;
}

Settings SettingsFromEnvironment(const std::function<const char*(const char*)>& get_environment) {
  Settings settings;
  for (const Option& option : Options()) {
    const std::string name = EnvironmentName(option.field.name);
    const char* value = get_environment(name.c_str());
    if (value == nullptr || *value == '\0') continue;
    settings[std::string(option.field.name)] = {value, Setting::Type::kText, name};
  }
  return settings;
}

absl::StatusOr<ServerConfig> MergeSettings(absl::Span<const Settings> layers) {
  ServerConfig config;
  std::vector<std::string> problems;
  for (const Option& option : Options()) {
    const Setting* strongest = nullptr;
    for (const Settings& layer : layers) {
      if (const auto found = layer.find(option.field.name); found != layer.end()) {
        strongest = &found->second;
      }
    }
    if (strongest == nullptr) continue;
    if (auto status = Apply(option, *strongest, &config); !status.ok()) {
      problems.push_back(absl::StrCat(strongest->origin, ": ", status.message()));
    }
  }
  if (auto status = AllProblems(problems); !status.ok()) return status;
  return config;
}

absl::Status Validate(const ServerConfig& config) {
  std::vector<std::string> problems;
  for (const Option& option : Options()) {
    ServerConfig ignored;
    if (auto status = option.parse(option.print(config), &ignored); !status.ok()) {
      problems.push_back(absl::StrCat(std::string(option.field.name), ": ", status.message()));
    }
  }
  if (config.checkpoint.empty()) {
    problems.push_back("checkpoint: got nothing, expected a directory of safetensors files");
  }
  CheckDevices(config, &problems);
  if (config.drain_grace_ms > config.drain_deadline_ms) {
    problems.push_back(absl::StrCat("drain-grace-ms: got ", config.drain_grace_ms,
                                    ", expected at most drain-deadline-ms (",
                                    config.drain_deadline_ms, ")"));
  }
  return AllProblems(problems);
}

std::string ToToml(const ServerConfig& config) {
  std::string text;
  for (const Option& option : Options()) {
    const std::string value = option.print(config);
    absl::StrAppend(&text, "# ", std::string(option.field.help), "\n",
                    std::string(option.field.name), " = ",
                    option.type == Setting::Type::kString ? toml::Quote(value) : value, "\n");
  }
  return text;
}

}  // namespace expertd
