#include "loader/inspect.h"

#include <cstdio>
#include <memory>
#include <string>

#include "config/exit_codes.h"
#include "config/limits.h"
#include "config/server_config.h"
#include "server/commands/commands.h"

namespace expertd {
namespace {

struct InspectFlags {
  std::string dir;
  std::string layers;
  InspectOptions options;
  bool json = false;
};

int RunInspect(const InspectFlags& flags) {
  const InspectReport report = Inspect(flags.dir, flags.options);
  const std::string text = flags.json ? InspectJson(report) : InspectText(report);
  std::fputs(text.c_str(), stdout);
  return report.CanBeServed() ? exit_codes::kOk : exit_codes::kFailed;
}

}  // namespace

void AddInspectCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "inspect",
      "What a checkpoint holds, which rank would load what, and everything that is wrong with it.\n"
      "Reads config and headers only; exit status 0 if it can be served, 1 if not.");
  const auto flags = std::make_shared<InspectFlags>();
  command->add_option("DIR", flags->dir, "Directory with config.json and safetensors files")
      ->required();
  command
      ->add_option("--ranks", flags->options.num_ranks,
                   "Number of ranks the experts are spread over")
      ->check(CLI::Range(1, limits::kMaxRanks))
      ->capture_default_str();
  command->add_option("--rank", flags->options.rank, "Look at this rank's experts only (from 0)")
      ->check(CLI::Range(0, limits::kMaxRanks - 1));
  command
      ->add_option("--layers", flags->layers,
                   "Layers to serve, A, A- or A-B as the tensors are numbered (default: all)")
      ->check([flags](const std::string& text) {
        CheckpointOptions& options = flags->options.checkpoint;
        return std::string(ParseLayers(text, &options.first_layer, &options.last_layer).message());
      });
  command->add_flag("--json", flags->json, "One JSON document instead of text");
  command->add_flag("--verify", flags->options.verify,
                    "Also read and check block scales and second-level scales");
  command->add_flag("--allow-symlinks", flags->options.checkpoint.allow_symlinks,
                    "Follow links that lead out of the directory");
  command->callback([flags, exit_code] { *exit_code = RunInspect(*flags); });
}

}  // namespace expertd
