#include "server/commands/client_flags.h"

#include <cstdio>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "config/exit_codes.h"

namespace expertd {
namespace {

constexpr absl::Duration kReachableTimeout = absl::Seconds(2);

std::string CheckAddress(const std::string& address) {
  if (address.find("://") != std::string::npos) {
    return "found '" + address + "', expected HOST:PORT or unix:PATH without a scheme";
  }
  const bool has_port = address.rfind("unix:", 0) == 0 || address.find(':') != std::string::npos;
  return has_port ? "" : "found '" + address + "', expected HOST:PORT or unix:PATH";
}

}  // namespace

CLI::Option* AddAddress(CLI::App* command, std::string* address) {
  return command->add_option("address", *address, "the daemon: HOST:PORT or unix:PATH")
      ->required()
      ->check(CLI::Validator(CheckAddress, ""))
      ->type_name("")
      ->option_text("ADDRESS");
}

CLI::Option* AddDuration(CLI::App* command, const std::string& name, absl::Duration* value,
                         const std::string& description) {
  const auto parse = [name, value](const std::string& text) {
    absl::Duration parsed;
    if (!absl::ParseDuration(text, &parsed) || parsed < absl::ZeroDuration() ||
        parsed > absl::Hours(24)) {
      throw CLI::ValidationError(
          name, "found '" + text + "', expected a duration of at most 24h such as 500ms, 5s or 2m");
    }
    *value = parsed;
  };
  return command->add_option_function<std::string>(name, parse, description)
      ->type_name("DURATION")
      ->default_str(absl::FormatDuration(*value));
}

CLI::Option* AddDType(CLI::App* command, DType* value) {
  const auto parse = [value](const std::string& text) {
    *value = text == "bf16" ? DType::kBf16 : DType::kF32;
  };
  return command->add_option_function<std::string>("--dtype", parse, "of hidden states and output")
      ->check(CLI::IsMember({"bf16", "f32"}))
      ->type_name("bf16|f32")
      ->default_str(std::string(DTypeName(*value)));
}

absl::StatusOr<std::vector<v1::LayerInfo>> SelectLayers(const v1::ListLayersResponse& served,
                                                        const std::string& layer) {
  if (served.layers().empty()) return absl::NotFoundError("the server serves no layer");
  if (layer == "all") {
    return std::vector<v1::LayerInfo>(served.layers().begin(), served.layers().end());
  }
  std::string numbers;
  int32_t wanted = 0;
  const bool is_number = absl::SimpleAtoi(layer, &wanted);
  for (const v1::LayerInfo& info : served.layers()) {
    if (is_number && info.layer() == wanted) return std::vector<v1::LayerInfo>{info};
    absl::StrAppend(&numbers, numbers.empty() ? "" : ", ", info.layer());
  }
  return absl::NotFoundError(
      absl::StrCat("layer: found '", layer, "', expected all or one of ", numbers));
}

int ReportClientError(const std::string& command, const absl::Status& status, Client* client) {
  const std::string text = status.ToString(absl::StatusToStringMode::kWithNoExtraData);
  std::fprintf(stderr, "expertd %s: %s\n", command.c_str(), text.c_str());
  const bool reached =
      !absl::IsUnavailable(status) || (client != nullptr && client->IsReachable(kReachableTimeout));
  return reached ? exit_codes::kFailed : exit_codes::kUnavailable;
}

}  // namespace expertd
