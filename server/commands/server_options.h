#pragma once

#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "config/server_config.h"

namespace expertd {

// The options of `serve` on a CLI11 command, with `--config FILE` and `--print-config`.
// Must live until the command was parsed: hold it where the command's callback does.
class ServerOptions {
 public:
  explicit ServerOptions(CLI::App& command);
  ServerOptions(const ServerOptions&) = delete;
  ServerOptions& operator=(const ServerOptions&) = delete;

  // After parsing: flag > environment > file > default, validated. INVALID_ARGUMENT with every
  // problem, one a line; the caller prints it and ends with exit_codes::kUsage.
  absl::StatusOr<ServerConfig> Resolve() const;

  // --print-config was given: the caller prints ToToml(*Resolve()) and ends with exit_codes::kOk.
  bool print_config() const { return print_config_; }

 private:
  Settings flags_;
  std::string config_file_;
  bool print_config_ = false;
};

}  // namespace expertd
