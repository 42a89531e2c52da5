#include <string>

#include "CLI/CLI.hpp"
#include "config/exit_codes.h"
#include "config/version.h"
#include "server/commands/commands.h"

int main(int argc, char** argv) {
  int exit_code = expertd::exit_codes::kOk;
  CLI::App app(
      "expertd keeps the routed experts of a Mixture-of-Experts model in FP4 and serves them over "
      "gRPC");
  app.set_version_flag("--version", "expertd " + std::string(expertd::Version()) + " (" +
                                        std::string(expertd::Commit()) + ")");
  app.require_subcommand(1);
  expertd::AddServeCommand(app, &exit_code);
  expertd::AddInspectCommand(app, &exit_code);
  expertd::AddCallCommand(app, &exit_code);
  expertd::AddBenchCommand(app, &exit_code);
  expertd::AddMakeCheckpointCommand(app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? expertd::exit_codes::kOk : expertd::exit_codes::kUsage;
  }
  return exit_code;
}
