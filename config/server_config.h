#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "config/dtype.h"
#include "config/limits.h"

namespace expertd {

enum class BackendKind { kAuto, kCpu, kCuda };  // kAuto: CUDA if a GPU is found, otherwise the CPU
enum class LogLevel { kTrace, kDebug, kInfo, kWarn, kError, kOff };
enum class LogFormat { kText, kJson };

// Everything `expertd serve` needs to know. Made once at start, then passed by const reference.
// config/README.md has the table of options; the one list in code is in server_config.cc.
struct ServerConfig {
  // what is served
  std::string checkpoint;  // directory
  std::string model_name;  // empty = the directory's name
  int32_t first_layer = 0;
  int32_t last_layer = -1;  // -1 = to the end
  bool allow_symlinks = false;

  // where and to whom
  std::string listen = "127.0.0.1:50061";  // HOST:PORT (port 0 = any free one) or unix:PATH
  std::string address_file;                // the bound address is written here; empty = nowhere

  // on what
  BackendKind backend = BackendKind::kAuto;
  int32_t ranks = 0;             // 0 = CPU: 1, CUDA: one a visible GPU
  std::vector<int32_t> devices;  // CUDA: one rank a device; empty = the first `ranks` visible ones
  DType partials = DType::kF32;  // CUDA, several ranks: partial rows on their way home
  int32_t redundant_slots = 0;   // per rank, beyond ceil(E / R)
  int32_t threads = 0;           // CPU backend, all ranks together; 0 = one a core
  int32_t load_threads = 0;      // readers; 0 = one a core, at most 16
  int32_t max_tokens_per_rank = limits::kDefaultMaxTokensPerRank;

  // how requests wait
  int64_t batch_wait_us = 0;  // how long a step may wait for more requests; 0 = never
  int32_t max_queued_requests = limits::kMaxQueuedRequests;
  int64_t max_inflight_bytes = limits::kMaxInflightBytes;
  int32_t max_stream_inflight = limits::kMaxStreamInflight;

  // time
  int64_t load_timeout_s = limits::kLoadTimeoutS;
  int64_t step_timeout_ms = limits::kStepTimeoutMs;
  int64_t drain_grace_ms = 0;  // SIGTERM: NOT_SERVING this long before new requests are refused
  int64_t drain_deadline_ms = limits::kDrainDeadlineMs;

  // what it says
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;

  bool operator==(const ServerConfig&) const = default;
};

// One option: the same name is the flag (--name), the key in the file (name) and, in capitals with
// underscores, the environment variable (EXPERTD_NAME).
struct ServerConfigField {
  std::string_view name;
  std::string_view value;  // what kind of value, for help: "DIR", "N", "auto|cpu|cuda"
  std::string_view help;
  bool is_bool = false;
  std::string default_text;
};
const std::vector<ServerConfigField>& ServerConfigFields();
std::string EnvironmentName(std::string_view field);  // "batch-wait-us" -> "EXPERTD_BATCH_WAIT_US"

// One setting as it was given. `origin` begins error messages: "--ranks", "EXPERTD_RANKS",
// "a.toml:3".
struct Setting {
  enum class Type { kText, kString, kInteger, kBoolean };  // kText: flags and environment, untyped

  std::string text;
  Type type = Type::kText;
  std::string origin;
};
using Settings = std::map<std::string, Setting, std::less<>>;  // by field name

// Reads the file format: the TOML subset of config/README.md. Unknown and repeated keys are errors.
absl::StatusOr<Settings> SettingsFromToml(std::string_view toml, std::string_view file_name);
// `get_environment` is std::getenv or a test's map. Unset and empty variables give nothing.
Settings SettingsFromEnvironment(const std::function<const char*(const char*)>& get_environment);

// The form of --layers: "A-B", "A-" (last = -1) or "A"; empty = all (0 and -1). Both ends included.
// INVALID_ARGUMENT "got ..., expected ...".
absl::Status ParseLayers(std::string_view text, int32_t* first_layer, int32_t* last_layer);

// `layers`: weakest first (file, environment, flags). INVALID_ARGUMENT with every problem, one a
// line.
absl::StatusOr<ServerConfig> MergeSettings(absl::Span<const Settings> layers);

// Can this be served? Every value again, what is required, and what values say together; every
// problem at once, one a line.
absl::Status Validate(const ServerConfig& config);

// The whole configuration as a file that SettingsFromToml reads back to the same struct.
std::string ToToml(const ServerConfig& config);

}  // namespace expertd
