#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "config/exit_codes.h"
#include "config/limits.h"
#include "server/app.h"
#include "server/commands/commands.h"
#include "server/commands/server_options.h"
#include "server/lifecycle.h"
#include "server/logging.h"
#include "spdlog/spdlog.h"

namespace expertd {
namespace {

// Message buffers stay mapped: unmapping and faulting them in again costs more than copying them.
void KeepMessageMemory() {
  mallopt(M_MMAP_THRESHOLD, limits::kKeptAllocationBytes);
  mallopt(M_TRIM_THRESHOLD, limits::kKeptHeapBytes);
}

// Written beside and renamed: a reader never sees half an address.
absl::Status WriteAddress(const std::string& path, const std::string& address) {
  const std::string temporary = path + ".new";
  {
    std::ofstream file(temporary, std::ios::trunc);
    file << address << "\n";
    if (!file.flush()) return absl::UnavailableError("cannot write " + temporary);
  }
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  if (error) return absl::UnavailableError("cannot write " + path + ": " + error.message());
  return absl::OkStatus();
}

int Complain(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "expertd serve: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

int Serve(const ServerConfig& given) {
  SetUpLogging(given.log_level, given.log_format);
  KeepMessageMemory();
  std::unique_ptr<App> app;  // outlives the watcher, which calls it
  SignalWatcher signals;     // first: reading headers from a slow disk takes a while
  const absl::StatusOr<ServerConfig> resolved = ResolveBackend(given);
  if (!resolved.ok()) return Complain(resolved.status(), exit_codes::kUsage);
  const ServerConfig& config = *resolved;
  absl::StatusOr<std::unique_ptr<App>> opened = App::Open(config, BackendFor(config.backend));
  if (!opened.ok()) return Complain(opened.status(), App::ExitCode(opened.status()));
  app = *std::move(opened);
  signals.OnTerminate([&app] { app->BeginDrain(); });
  const absl::StatusOr<std::string> address = app->Listen();
  if (!address.ok()) return Complain(address.status(), exit_codes::kOsError);
  spdlog::info("listening on {}", *address);
  std::printf("%s\n", address->c_str());
  std::fflush(stdout);
  if (!config.address_file.empty()) {
    const absl::Status written = WriteAddress(config.address_file, *address);
    if (!written.ok()) return Complain(written, exit_codes::kOsError);
  }
  app->StartLoading();

  const absl::Status over = app->WaitUntilOver();
  if (!over.ok()) Complain(over, 0);
  // After a failure every call has its answer: only the sending is left, and steps that hang.
  const int64_t drain_ms = over.ok() ? config.drain_deadline_ms
                                     : std::min(config.drain_deadline_ms, limits::kFailedDrainMs);
  const absl::Time deadline = absl::Now() + absl::Milliseconds(drain_ms);
  Watchdog watchdog("shutdown", deadline + absl::Milliseconds(limits::kShutdownMarginMs));
  app->Shutdown(deadline);
  return App::ExitCode(over);
}

}  // namespace

void AddServeCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "serve", "Load a checkpoint's routed experts and answer requests over gRPC until SIGTERM");
  const auto options = std::make_shared<ServerOptions>(*command);
  command->callback([options, exit_code] {
    const absl::StatusOr<ServerConfig> config = options->Resolve();
    if (!config.ok()) {
      *exit_code = Complain(config.status(), exit_codes::kUsage);
    } else if (options->print_config()) {
      std::fputs(ToToml(*config).c_str(), stdout);
    } else {
      *exit_code = Serve(*config);
    }
  });
}

}  // namespace expertd
