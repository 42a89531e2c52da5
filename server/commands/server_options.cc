#include "server/commands/server_options.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace expertd {
namespace {

absl::StatusOr<std::string> ReadConfigFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(limits::kMaxServerConfigBytes + 1, '\0');
  if (!file) return absl::InvalidArgumentError(absl::StrCat("--config: cannot open ", path));
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad() || (file.fail() && !file.eof())) {
    return absl::InvalidArgumentError(absl::StrCat("--config: cannot read ", path));
  }
  text.resize(file.gcount());
  if (text.size() > limits::kMaxServerConfigBytes) {
    return absl::InvalidArgumentError(absl::StrCat("--config: ", path, " is larger than ",
                                                   limits::kMaxServerConfigBytes, " bytes"));
  }
  return text;
}

}  // namespace

ServerOptions::ServerOptions(CLI::App& command) {
  for (const ServerConfigField& field : ServerConfigFields()) {
    const std::string name(field.name);
    const std::string flag = "--" + name;
    std::string help(field.help);
    if (!field.default_text.empty()) help += " [" + field.default_text + "]";
    const auto store = [this, name, flag](const std::string& text) {
      flags_[name] = {text, Setting::Type::kText, flag};
    };
    if (field.is_bool) {
      command.add_flag_function(
          flag + ",!--no-" + name, [store](int64_t count) { store(count > 0 ? "true" : "false"); },
          help);
    } else {
      // The checkpoint may also be given without its flag.
      command
          .add_option_function<std::string>(name == "checkpoint" ? name + "," + flag : flag, store,
                                            help)
          ->type_name(std::string(field.value));
    }
  }
  command
      .add_option("--config", config_file_,
                  "file with the same options as key = value; flags and EXPERTD_* variables win")
      ->type_name("FILE")
      ->envname("EXPERTD_CONFIG");
  command.add_flag("--print-config", print_config_,
                   "print what flags, environment and file come to, as such a file, and leave");
  command.footer(
      "Every option may also be set in the environment: --batch-wait-us as EXPERTD_BATCH_WAIT_US.\n"
      "Precedence: flag, environment, file, default.");
}

absl::StatusOr<ServerConfig> ServerOptions::Resolve() const {
  Settings from_file;
  if (!config_file_.empty()) {
    const auto text = ReadConfigFile(config_file_);
    if (!text.ok()) return text.status();
    auto settings = SettingsFromToml(*text, config_file_);
    if (!settings.ok()) return settings.status();
    from_file = *std::move(settings);
  }
  const Settings from_environment =
      SettingsFromEnvironment([](const char* name) { return std::getenv(name); });
  auto config = MergeSettings({from_file, from_environment, flags_});
  if (!config.ok() || print_config_)
    return config;  // printed as merged, even if it cannot serve yet
  if (auto status = Validate(*config); !status.ok()) return status;
  return config;
}

}  // namespace expertd
