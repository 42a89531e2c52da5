#pragma once

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "config/dtype.h"
#include "server/client.h"

// What `call` and `bench` share: how flags are read and how an error becomes one line and an exit
// code.
namespace expertd {

CLI::Option* AddAddress(CLI::App* command, std::string* address);

// A duration with its unit, e.g. 500ms, 5s, 1m. Refused: negative, infinite, no unit.
CLI::Option* AddDuration(CLI::App* command, const std::string& name, absl::Duration* value,
                         const std::string& description);

CLI::Option* AddDType(CLI::App* command, DType* value);

// "all" or one layer's number, looked up in what the server serves. NOT_FOUND names the layers.
absl::StatusOr<std::vector<v1::LayerInfo>> SelectLayers(const v1::ListLayersResponse& served,
                                                        const std::string& layer);

// Prints "expertd COMMAND: CODE: message" to stderr and gives the exit code: kUnavailable if the
// server could not be reached, kFailed if it answered with an error. `client` may be null: then an
// UNAVAILABLE status means that there was no connection.
int ReportClientError(const std::string& command, const absl::Status& status, Client* client);

}  // namespace expertd
