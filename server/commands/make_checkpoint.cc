#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "config/exit_codes.h"
#include "loader/checkpoint_writer.h"
#include "server/commands/commands.h"

namespace expertd {
namespace {

// What was typed; what was not leaves the preset's value.
struct MakeCheckpointFlags {
  std::string dir;
  std::string preset = "tiny";
  std::string recipe;
  std::string style;
  std::string layers;
  std::string only_experts;
  std::string shard_size = "64MB";
  std::string defect;
  std::optional<int64_t> hidden_size;
  std::optional<int64_t> intermediate_size;
  std::optional<int32_t> num_experts;
  std::optional<int32_t> top_k;
  std::optional<int32_t> num_hidden_layers;
  std::optional<float> swiglu_limit;
  int32_t num_mtp_layers = 0;
  uint64_t seed = 1;
  bool power_of_two_scales = false;
};

// "7" or "4-7", both ends included.
absl::StatusOr<std::vector<int32_t>> ParseRange(const std::string& field, const std::string& text) {
  const size_t dash = text.find('-');
  int32_t first = 0;
  int32_t last = 0;
  const bool numbers =
      absl::SimpleAtoi(text.substr(0, dash), &first) &&
      absl::SimpleAtoi(dash == std::string::npos ? text : text.substr(dash + 1), &last);
  constexpr int32_t kEnd = 1 << 20;  // far beyond every limit that is checked later
  if (!numbers || first < 0 || last < first || last >= kEnd) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": got ", text, ", expected N or A-B with 0 <= A <= B"));
  }
  std::vector<int32_t> range(last - first + 1);
  std::iota(range.begin(), range.end(), first);
  return range;
}

// "4096", "64MB" (10^6), "64MiB" (2^20), likewise K and G.
absl::StatusOr<uint64_t> ParseBytes(const std::string& text) {
  static constexpr struct {
    const char* suffix;
    uint64_t factor;
  } kUnits[] = {{"KiB", 1ull << 10},
                {"MiB", 1ull << 20},
                {"GiB", 1ull << 30},
                {"KB", 1'000},
                {"MB", 1'000'000},
                {"GB", 1'000'000'000},
                {"", 1}};
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  uint64_t number = 0;
  for (const auto& unit : kUnits) {
    if (text.substr(digits) != unit.suffix) continue;
    if (!absl::SimpleAtoi(text.substr(0, digits), &number)) break;
    if (number > std::numeric_limits<uint64_t>::max() / unit.factor) break;
    return number * unit.factor;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--shard-size: got ", text, ", expected a number with KB, MB, GB, KiB, MiB, GiB or nothing"));
}

absl::Status ApplyNames(const MakeCheckpointFlags& flags, CheckpointRequest* request) {
  if (flags.recipe == "mxfp4") request->recipe = Recipe::kMxfp4;
  if (flags.recipe == "nvfp4") request->recipe = Recipe::kNvfp4;
  if (flags.style == "deepseek-v4") request->style = CheckpointStyle::kDeepSeekV4;
  if (flags.style == "qwen3") request->style = CheckpointStyle::kQwen3;
  for (const CheckpointDefectInfo& info : CheckpointDefects()) {
    if (info.name == flags.defect) request->defect = info.defect;
  }
  if (!flags.defect.empty() && request->defect == CheckpointDefect::kNone) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--break: got ", flags.defect, ", expected one of the kinds that --help lists"));
  }
  return absl::OkStatus();
}

absl::Status ApplyLayers(const MakeCheckpointFlags& flags, CheckpointRequest* request) {
  if (!flags.layers.empty()) {
    auto layers = ParseRange("--layers", flags.layers);
    if (!layers.ok()) return layers.status();
    request->layers = *std::move(layers);
    request->num_hidden_layers = request->layers.back() + 1;
  }
  if (flags.num_hidden_layers) request->num_hidden_layers = *flags.num_hidden_layers;
  if (!flags.only_experts.empty()) {
    auto experts = ParseRange("--only-experts", flags.only_experts);
    if (!experts.ok()) return experts.status();
    request->experts = *std::move(experts);
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointRequest> MakeRequest(const MakeCheckpointFlags& flags) {
  auto request = RequestFromPreset(flags.preset);
  if (!request.ok()) return request.status();
  request->dir = flags.dir;
  if (auto status = ApplyNames(flags, &*request); !status.ok()) return status;
  if (auto status = ApplyLayers(flags, &*request); !status.ok()) return status;
  const auto shard_bytes = ParseBytes(flags.shard_size);
  if (!shard_bytes.ok()) return shard_bytes.status();
  request->shard_bytes = *shard_bytes;
  request->hidden_size = flags.hidden_size.value_or(request->hidden_size);
  request->intermediate_size = flags.intermediate_size.value_or(request->intermediate_size);
  request->num_experts = flags.num_experts.value_or(request->num_experts);
  request->top_k = flags.top_k.value_or(std::min(request->top_k, request->num_experts));
  request->swiglu_limit = flags.swiglu_limit.value_or(request->swiglu_limit);
  request->num_mtp_layers = flags.num_mtp_layers;
  request->seed = flags.seed;
  request->power_of_two_scales = flags.power_of_two_scales;
  return request;
}

void PrintSummary(const CheckpointRequest& request, const CheckpointSummary& summary,
                  double seconds) {
  const size_t num_experts =
      request.experts.empty() ? static_cast<size_t>(request.num_experts) : request.experts.size();
  std::printf("wrote %s\n", request.dir.c_str());
  std::printf("  %s, %s: H %lld, I %lld, E %d (%zu written), K %d, %zu layers",
              request.style == CheckpointStyle::kQwen3 ? "qwen3" : "deepseek-v4",
              std::string(RecipeName(request.recipe)).c_str(),
              static_cast<long long>(request.hidden_size),
              static_cast<long long>(request.intermediate_size), request.num_experts, num_experts,
              request.top_k, request.layers.size());
  if (request.num_mtp_layers > 0) std::printf(" + %d mtp", request.num_mtp_layers);
  std::printf(", seed %llu\n", static_cast<unsigned long long>(request.seed));
  std::printf("  %lld tensors in %d shard%s, %llu bytes, %.2f s (%.0f MB/s)\n",
              static_cast<long long>(summary.num_tensors), summary.num_shards,
              summary.num_shards == 1 ? "" : "s", static_cast<unsigned long long>(summary.bytes),
              seconds, static_cast<double>(summary.bytes) / 1e6 / std::max(seconds, 1e-9));
  for (const CheckpointDefectInfo& info : CheckpointDefects()) {
    if (info.defect != request.defect) continue;
    std::printf("  broken on purpose: %s\n", std::string(info.sentence).c_str());
  }
}

int Run(const MakeCheckpointFlags& flags) {
  const auto request = MakeRequest(flags);
  if (!request.ok()) {
    std::fprintf(stderr, "expertd make-checkpoint: %s\n",
                 std::string(request.status().message()).c_str());
    return exit_codes::kUsage;
  }
  CheckpointSummary summary;
  const auto start = std::chrono::steady_clock::now();
  if (auto status = WriteCheckpoint(*request, &summary); !status.ok()) {
    std::fprintf(stderr, "expertd make-checkpoint: %s\n", std::string(status.message()).c_str());
    const bool wrong_flags = status.code() == absl::StatusCode::kInvalidArgument ||
                             status.code() == absl::StatusCode::kAlreadyExists;
    return wrong_flags ? exit_codes::kUsage : exit_codes::kOsError;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  PrintSummary(*request, summary, seconds.count());
  return exit_codes::kOk;
}

std::string Footer() {
  std::string text = "Presets:\n";
  for (const CheckpointPreset& preset : CheckpointPresets()) {
    absl::StrAppendFormat(&text, "  %-15s %s: H %d, I %d, E %d, K %d, %d layers, %s\n",
                          std::string(preset.name), std::string(preset.description),
                          preset.hidden_size, preset.intermediate_size, preset.num_experts,
                          preset.top_k, preset.num_layers, std::string(RecipeName(preset.recipe)));
  }
  absl::StrAppend(&text, "\nKinds of --break:\n");
  for (const CheckpointDefectInfo& info : CheckpointDefects()) {
    absl::StrAppendFormat(&text, "  %-22s %s%s\n", std::string(info.name),
                          std::string(info.sentence),
                          info.needs_nvfp4   ? " (nvfp4)"
                          : info.needs_mxfp4 ? " (mxfp4)"
                                             : "");
  }
  absl::StrAppend(
      &text,
      "\nExample: two layers of DeepSeek-V4-Flash with 16 of its experts\n"
      "  expertd make-checkpoint /tmp/flash --preset flash --layers 0-1 --experts 16\n");
  return text;
}

void AddFamilyOptions(CLI::App* command, MakeCheckpointFlags* flags) {
  command->add_option("--preset", flags->preset, "Geometry and family to start from [tiny]")
      ->type_name("NAME");
  command->add_option("--recipe", flags->recipe, "Number format; default: the preset's")
      ->check(CLI::IsMember({"mxfp4", "nvfp4"}))
      ->type_name("NAME");
  command->add_option("--style", flags->style, "Tensor names; default: the preset's")
      ->check(CLI::IsMember({"deepseek-v4", "qwen3"}))
      ->type_name("NAME");
  command->add_flag("--power-of-two-scales", flags->power_of_two_scales,
                    "NVFP4: as a lossless cast of MXFP4 would be");
}

void AddGeometryOptions(CLI::App* command, MakeCheckpointFlags* flags) {
  const auto number = [&](const char* name, auto* value, const char* help) {
    command->add_option(name, *value, help)->type_name("N");
  };
  const auto range = [&](const char* name, std::string* value, const char* help) {
    command->add_option(name, *value, help)->type_name("A-B");
  };
  number("--hidden", &flags->hidden_size, "Hidden size (H), a multiple of 32");
  number("--intermediate", &flags->intermediate_size, "Intermediate size (I), a multiple of 32");
  number("--experts", &flags->num_experts, "Experts of a layer (E)");
  number("--top-k", &flags->top_k, "Experts of a token (K)");
  command
      ->add_option("--swiglu-limit", flags->swiglu_limit,
                   "Clamp of gate and up, deepseek-v4 only; 0: none [10]")
      ->type_name("X");
  range("--layers", &flags->layers, "Layers to write; default: all of the preset");
  number("--num-hidden-layers", &flags->num_hidden_layers,
         "Layer count in config.json; default: the last written layer + 1");
  number("--mtp-layers", &flags->num_mtp_layers, "Multi-token-prediction layers [0]");
  range("--only-experts", &flags->only_experts,
        "Write these of the E experts only, e.g. one rank's");
}

}  // namespace

void AddMakeCheckpointCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<MakeCheckpointFlags>();
  CLI::App* command = app.add_subcommand(
      "make-checkpoint",
      "Write a random FP4 checkpoint: any supported family, any size, whole or broken on purpose.\n"
      "The same options give the same bytes on every machine.");
  command->add_option("dir", flags->dir, "Directory to write: new or empty")
      ->required()
      ->type_name("DIR");
  AddFamilyOptions(command, flags.get());
  AddGeometryOptions(command, flags.get());
  command->add_option("--seed", flags->seed, "Another seed, other weights [1]")->type_name("N");
  command
      ->add_option("--shard-size", flags->shard_size,
                   "A shard closes after the tensor that passes this [64MB]")
      ->type_name("SIZE");
  command->add_option("--break", flags->defect, "Write it with one thing wrong")->type_name("KIND");
  command->footer(Footer());
  command->callback([flags, exit_code] { *exit_code = Run(*flags); });
}

}  // namespace expertd
