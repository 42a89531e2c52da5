#include "server/commands/commands.h"

namespace expertd {

void AddServeCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("serve", "");
  command->callback([exit_code] { *exit_code = 70; });
}

}  // namespace expertd
