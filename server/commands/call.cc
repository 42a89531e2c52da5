#include "server/commands/commands.h"

namespace expertd {

void AddCallCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("call", "");
  command->callback([exit_code] { *exit_code = 70; });
}

}  // namespace expertd
