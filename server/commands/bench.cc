#include "server/commands/commands.h"

namespace expertd {

void AddBenchCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("bench", "");
  command->callback([exit_code] { *exit_code = 70; });
}

}  // namespace expertd
