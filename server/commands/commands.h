#pragma once

#include "CLI/CLI.hpp"

// One function a subcommand: adds it with its options to `app`; when it was chosen, its callback
// runs it and stores the process's exit code (config/exit_codes.h).
namespace expertd {

void AddServeCommand(CLI::App& app, int* exit_code);
void AddInspectCommand(CLI::App& app, int* exit_code);
void AddCallCommand(CLI::App& app, int* exit_code);
void AddBenchCommand(CLI::App& app, int* exit_code);
void AddMakeCheckpointCommand(CLI::App& app, int* exit_code);

}  // namespace expertd
