#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "config/exit_codes.h"
#include "server/client.h"
#include "server/commands/bench_report.h"
#include "server/commands/client_flags.h"
#include "server/commands/commands.h"
#include "server/load_generator.h"

namespace expertd {
namespace {

constexpr char kDescription[] =
    "Load a running daemon and report latency and throughput.\n\n"
    "A closed loop: every worker has its own connection and sends its next request when it has "
    "the\n"
    "answer to the last. Failed requests are counted, not retried. Ctrl-C ends the run and prints "
    "the\n"
    "report; a second Ctrl-C ends at once.";
constexpr char kFooter[] =
    "Examples:\n"
    "  expertd bench 127.0.0.1:50061 --layer 3 --tokens 8 --concurrency 4 --duration 10s\n"
    "  expertd bench 127.0.0.1:50061 --layer all --mode stream --inflight 2 --json report.json\n\n"
    "Latency is counted from before the send to the decoded answer; percentiles are right to 1.6 "
    "%.\n\n"
    "Exit status: 0 every request was answered; 1 some failed; 2 wrong usage; 69 the server could\n"
    "not be reached.";

// The one thing a signal handler can reach.
std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void InstallStopSignals() {
  struct sigaction action = {};
  action.sa_handler = [](int) { stop_requested.store(true, std::memory_order_relaxed); };
  action.sa_flags = SA_RESETHAND;  // the second signal has its default effect
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

struct BenchFlags {
  LoadOptions load;
  std::string layer = "all";
  std::string mode = "unary";
  std::string json_file;
};

// Asks the server what it serves and checks the load against it.
absl::StatusOr<v1::ServerInfo> Prepare(BenchFlags* flags) {
  const auto client = Client::Connect(flags->load.address);
  if (!client.ok()) return client.status();
  const auto served = (*client)->ListLayers(flags->load.timeout);
  if (!served.ok()) return served.status();
  auto layers = SelectLayers(*served, flags->layer);
  if (!layers.ok()) return layers.status();
  flags->load.layers = *std::move(layers);
  return (*client)->info();
}

int WriteJson(const std::string& path, const std::string& json) {
  if (path == "-") {
    std::fwrite(json.data(), 1, json.size(), stdout);
    return exit_codes::kOk;
  }
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << json;
  file.close();
  if (file) return exit_codes::kOk;
  std::fprintf(stderr, "expertd bench: --json: cannot write %s\n", path.c_str());
  return exit_codes::kOsError;
}

int RunBench(BenchFlags* flags) {
  flags->load.mode = flags->mode == "stream" ? LoadMode::kStream : LoadMode::kUnary;
  if (flags->load.mode == LoadMode::kUnary && flags->load.inflight > 1) {
    std::fprintf(stderr, "expertd bench: --inflight: found %d, expected 1 without --mode stream\n",
                 flags->load.inflight);
    return exit_codes::kUsage;
  }
  const auto server = Prepare(flags);
  if (!server.ok()) return ReportClientError("bench", server.status(), nullptr);
  InstallStopSignals();
  const auto report = RunLoad(flags->load, &stop_requested);
  if (!report.ok()) return ReportClientError("bench", report.status(), nullptr);
  if (flags->json_file != "-") {
    const std::string text = LoadReportText(flags->load, *report);
    std::fwrite(text.data(), 1, text.size(), stdout);
  }
  if (!flags->json_file.empty()) {
    const int written = WriteJson(flags->json_file, LoadReportJson(flags->load, *server, *report));
    if (written != exit_codes::kOk) return written;
  }
  return report->num_errors() == 0 ? exit_codes::kOk : exit_codes::kFailed;
}

void AddLoadOptions(CLI::App* command, BenchFlags* flags) {
  LoadOptions& load = flags->load;
  command->add_option("--layer", flags->layer, "one layer, or all in turn")
      ->capture_default_str()
      ->type_name("all|LAYER");
  command->add_option("--tokens", load.tokens, "rows of a request")
      ->capture_default_str()
      ->type_name("T")
      ->check(CLI::Range(1, limits::kMaxTokensPerRank));
  command->add_option("--top-k", load.top_k, "experts a token; 0 = the layer's own")
      ->capture_default_str()
      ->type_name("K")
      ->check(CLI::Range(0, limits::kMaxTopK));
  AddDType(command, &load.dtype);
  command->add_option("--seed", load.seed, "of the made-up input")
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--concurrency", load.concurrency, "workers, one connection each")
      ->capture_default_str()
      ->type_name("C")
      ->check(CLI::Range(1, limits::kMaxBenchConcurrency));
  command->add_option("--mode", flags->mode, "one call a request, or one stream a worker")
      ->capture_default_str()
      ->type_name("unary|stream")
      ->check(CLI::IsMember({"unary", "stream"}));
  command->add_option("--inflight", load.inflight, "requests in flight on a worker's stream")
      ->capture_default_str()
      ->type_name("N")
      ->check(CLI::Range(1, limits::kMaxStreamInflight));
}

}  // namespace

void AddBenchCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand("bench", kDescription);
  command->footer(kFooter);
  AddAddress(command, &flags->load.address);
  AddLoadOptions(command, flags.get());
  CLI::Option* duration =
      AddDuration(command, "--duration", &flags->load.duration, "how long to measure");
  command
      ->add_option("--requests", flags->load.num_requests,
                   "measure this many requests instead, all workers together")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->excludes(duration);
  AddDuration(command, "--warmup", &flags->load.warmup, "load before the measurement");
  AddDuration(command, "--timeout", &flags->load.timeout, "of one request");
  command
      ->add_option("--json", flags->json_file,
                   "also write the report as JSON; - is standard output")
      ->type_name("FILE");
  command->callback([flags, exit_code] { *exit_code = RunBench(flags.get()); });
}

}  // namespace expertd
