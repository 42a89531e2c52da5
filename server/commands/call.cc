#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/exit_codes.h"
#include "google/protobuf/util/json_util.h"
#include "server/client.h"
#include "server/commands/call_print.h"
#include "server/commands/client_flags.h"
#include "server/commands/commands.h"
#include "server/random_request.h"

namespace expertd {
namespace {

constexpr char kExpertService[] = "expertd.v1.ExpertService";
constexpr char kDescription[] =
    "Send one request to a running daemon and print the answer.\n\n"
    "Choose one thing to ask; the other options shape it.";
constexpr char kFooter[] =
    "Examples:\n"
    "  expertd call 127.0.0.1:50061 --health --wait 60s    until the weights are loaded\n"
    "  expertd call 127.0.0.1:50061 --self-test all        compare every layer with the reference\n"
    "  expertd call 127.0.0.1:50061 --layer 3 --tokens 16  a made-up batch through layer 3\n"
    "  expertd call 127.0.0.1:50061 --input request.json --json\n\n"
    "A request file is the JSON form of expertd.v1.ForwardRequest, as grpcurl takes it.\n\n"
    "Exit status: 0 answered; 1 answered with an error, not healthy or self-test failed;\n"
    "2 wrong usage; 69 the server could not be reached.";

struct CallFlags {
  std::string address;
  bool health = false;
  bool info = false;
  bool layers = false;
  bool progress = false;
  std::string self_test;
  std::string layer;
  std::string input;

  std::string service = kExpertService;
  absl::Duration wait;
  absl::Duration timeout = absl::Seconds(10);
  int attempts = limits::kClientMaxAttempts;
  RandomRequestOptions request;
  bool json = false;
};

void Print(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

int RunHealth(const CallFlags& flags) {
  const absl::Status status = WaitUntilHealthy(flags.address, flags.service, flags.wait);
  if (!status.ok()) return ReportClientError("call", status, nullptr);
  Print(flags.json ? "{\"status\": \"SERVING\"}\n" : "SERVING\n");
  return exit_codes::kOk;
}

int RunSelfTest(const CallFlags& flags, Client* client) {
  const auto served = client->ListLayers(flags.timeout);
  if (!served.ok()) return ReportClientError("call", served.status(), client);
  const auto layers = SelectLayers(*served, flags.self_test);
  if (!layers.ok()) return ReportClientError("call", layers.status(), client);
  int exit_code = exit_codes::kOk;
  std::string json;  // an array, so that the whole output is one document
  for (const v1::LayerInfo& layer : *layers) {
    v1::SelfTestRequest request;
    request.set_layer(layer.layer());
    request.set_num_tokens(flags.request.tokens);
    request.set_seed(flags.request.seed);
    const auto response = client->SelfTest(request, flags.timeout);
    if (!response.ok()) {
      const absl::Status failed(response.status().code(),
                                absl::StrCat("self-test of layer ", layer.layer(), ": ",
                                             std::string(response.status().message())));
      return ReportClientError("call", failed, client);
    }
    if (flags.json) {
      absl::StrAppend(&json, json.empty() ? "[" : ",", ToJson(*response));
    } else {
      Print(SelfTestText(*response));
    }
    if (!response->passed()) exit_code = exit_codes::kFailed;
  }
  if (flags.json) Print(json + "]\n");
  return exit_code;
}

absl::StatusOr<v1::ForwardRequest> ReadRequest(const std::string& path) {
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    if (!file) return absl::InvalidArgumentError(absl::StrCat("--input: cannot read ", path));
  }
  std::istream& in = path == "-" ? std::cin : file;
  std::string text;
  char block[1 << 16];
  while (in.read(block, sizeof(block)) || in.gcount() > 0) {
    text.append(block, static_cast<size_t>(in.gcount()));
    if (text.size() > static_cast<size_t>(limits::kMaxCallInputBytes)) {
      return absl::InvalidArgumentError(absl::StrCat("--input: ", path, " is longer than ",
                                                     limits::kMaxCallInputBytes, " bytes"));
    }
  }
  v1::ForwardRequest request;
  const auto status = google::protobuf::util::JsonStringToMessage(text, &request);
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--input: ", path, " is not a ForwardRequest in JSON: ", std::string(status.message())));
  }
  return request;
}

absl::StatusOr<v1::ForwardRequest> MakeRequest(const CallFlags& flags, Client* client) {
  if (!flags.input.empty()) return ReadRequest(flags.input);
  const auto served = client->ListLayers(flags.timeout);
  if (!served.ok()) return served.status();
  const auto layers = SelectLayers(*served, flags.layer);
  if (!layers.ok()) return layers.status();
  return MakeRandomRequest(layers->front(), flags.request);
}

int RunForward(const CallFlags& flags, Client* client) {
  const auto request = MakeRequest(flags, client);
  if (!request.ok()) return ReportClientError("call", request.status(), client);
  v1::ForwardResponse response;
  const absl::Time sent = absl::Now();
  const absl::Status status = client->Forward(*request, {flags.timeout, flags.attempts}, &response);
  if (!status.ok()) return ReportClientError("call", status, client);
  Print(flags.json ? ToJson(response) : ForwardText(*request, response, absl::Now() - sent));
  return exit_codes::kOk;
}

template <typename Response>
int PrintAnswer(const absl::StatusOr<Response>& response, bool json, Client* client,
                std::string (*to_text)(const Response&)) {
  if (!response.ok()) return ReportClientError("call", response.status(), client);
  Print(json ? ToJson(*response) : to_text(*response));
  return exit_codes::kOk;
}

int RunCall(const CallFlags& flags) {
  if (flags.health) return RunHealth(flags);
  if (flags.wait > absl::ZeroDuration()) {
    const absl::Status healthy = WaitUntilHealthy(flags.address, flags.service, flags.wait);
    if (!healthy.ok()) return ReportClientError("call", healthy, nullptr);
  }
  const auto client = Client::Connect(flags.address);
  if (!client.ok()) return ReportClientError("call", client.status(), nullptr);
  Client* const connected = client->get();
  if (flags.info) {
    return PrintAnswer(connected->GetServerInfo(flags.timeout), flags.json, connected, InfoText);
  }
  if (flags.layers) {
    return PrintAnswer(connected->ListLayers(flags.timeout), flags.json, connected, LayersText);
  }
  if (flags.progress) {
    return PrintAnswer(connected->GetLoadProgress(flags.timeout), flags.json, connected,
                       ProgressText);
  }
  if (!flags.self_test.empty()) return RunSelfTest(flags, connected);
  return RunForward(flags, connected);
}

// Exactly one of these is wanted; checked after parsing, where the message can name them all.
std::vector<CLI::Option*> AddActions(CLI::App* command, CallFlags* flags) {
  std::vector<CLI::Option*> actions = {
      command->add_flag("--health", flags->health,
                        "is the service healthy? With --wait: until it is"),
      command->add_flag("--info", flags->info, "version, model, backend, limits"),
      command->add_flag("--layers", flags->layers, "the layers that are served, their geometry"),
      command->add_flag("--progress", flags->progress, "how far the weights are loaded"),
      command
          ->add_option("--self-test", flags->self_test,
                       "the server checks its own answers: all layers or one")
          ->type_name("all|LAYER"),
      command->add_option("--layer", flags->layer, "send a made-up batch through this layer")
          ->type_name("LAYER"),
      command
          ->add_option("--input", flags->input,
                       "send the request of this file; - is standard input")
          ->type_name("FILE.json"),
  };
  for (CLI::Option* action : actions) action->group("What to ask");
  return actions;
}

void CheckOneAction(const std::vector<CLI::Option*>& actions) {
  std::string given;
  int num_given = 0;
  for (const CLI::Option* action : actions) {
    if (action->count() == 0) continue;
    absl::StrAppend(&given, num_given++ == 0 ? "" : ", ", action->get_name());
  }
  if (num_given == 1) return;
  throw CLI::ValidationError("what to ask", "found " + (given.empty() ? "nothing" : given) +
                                                ", expected exactly one of --health, --info, "
                                                "--layers, --progress, --self-test, --layer, "
                                                "--input");
}

}  // namespace

void AddCallCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<CallFlags>();
  CLI::App* command = app.add_subcommand("call", kDescription);
  command->footer(kFooter);
  AddAddress(command, &flags->address);
  const std::vector<CLI::Option*> actions = AddActions(command, flags.get());
  command->add_option("--tokens", flags->request.tokens, "rows of --layer or --self-test")
      ->capture_default_str()
      ->type_name("T")
      ->check(CLI::Range(0, limits::kMaxTokensPerRank));
  command->add_option("--top-k", flags->request.top_k, "experts a token; 0 = the layer's own")
      ->capture_default_str()
      ->type_name("K")
      ->check(CLI::Range(0, limits::kMaxTopK));
  command->add_option("--seed", flags->request.seed, "of the made-up input")
      ->capture_default_str()
      ->type_name("N");
  AddDType(command, &flags->request.dtype);
  AddDuration(command, "--wait", &flags->wait, "wait this long for the server to become healthy");
  AddDuration(command, "--timeout", &flags->timeout, "of each request, its retries included");
  command->add_option("--attempts", flags->attempts, "tries of a Forward; 1 = no retry")
      ->capture_default_str()
      ->type_name("N")
      ->check(CLI::Range(1, 100));
  command->add_option("--service", flags->service, "health service name; '' is the process")
      ->capture_default_str()
      ->type_name("NAME");
  command->add_flag("--json", flags->json, "print the answer as JSON");
  command->callback([flags, actions, exit_code] {
    CheckOneAction(actions);
    *exit_code = RunCall(*flags);
  });
}

}  // namespace expertd
