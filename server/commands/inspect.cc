#include "server/commands/commands.h"

namespace expertd {

void AddInspectCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("inspect", "");
  command->callback([exit_code] { *exit_code = 70; });
}

}  // namespace expertd
