#include "server/commands/bench_report.h"

#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace expertd {
namespace {

double PerSecond(double count, const LoadReport& report) {
  const double seconds = absl::ToDoubleSeconds(report.elapsed);
  return seconds > 0 ? count / seconds : 0;
}

double Mean(uint64_t sum, const TimingSums& sums) {
  return sums.count == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(sums.count);
}

const char* ModeName(LoadMode mode) { return mode == LoadMode::kUnary ? "unary" : "stream"; }

}  // namespace

std::string LoadReportText(const LoadOptions& options, const LoadReport& report) {
  const LatencyHistogram& latency = report.latency;
  const TimingSums& server = report.server;
  const auto requests = static_cast<double>(latency.count());
  std::string text =
      absl::StrFormat("%d workers, %s, %d in flight each, %d tokens of %s a request, %d layers%s\n",
                      options.concurrency, ModeName(options.mode), options.inflight, options.tokens,
                      std::string(DTypeName(options.dtype)), options.layers.size(),
                      report.stopped_early ? "; stopped early" : "");
  absl::StrAppendFormat(&text, "%d requests answered in %.2f s: %.1f requests/s, %.1f tokens/s\n",
                        latency.count(), absl::ToDoubleSeconds(report.elapsed),
                        PerSecond(requests, report), PerSecond(requests * options.tokens, report));
  absl::StrAppendFormat(&text, "latency us: min %d, mean %.0f, p50 %d, p90 %d, p99 %d, max %d\n",
                        latency.min_us(), latency.mean_us(), latency.Percentile(50),
                        latency.Percentile(90), latency.Percentile(99), latency.max_us());
  absl::StrAppendFormat(
      &text,
      "server us (mean): receive %.0f, queue %.0f, copy in %.0f, kernel %.0f, copy out %.0f, "
      "total %.0f; %.1f rows a step\n",
      Mean(server.receive_us, server), Mean(server.queue_us, server),
      Mean(server.copy_in_us, server), Mean(server.kernel_us, server),
      Mean(server.copy_out_us, server), Mean(server.total_us, server),
      Mean(server.step_tokens, server));
  for (const auto& [code, count] : report.errors) {
    absl::StrAppendFormat(&text, "errors: %s %d\n", code, count);
  }
  if (!report.first_error.empty()) {
    absl::StrAppendFormat(&text, "first error: %s\n", report.first_error);
  }
  return text;
}

std::string LoadReportJson(const LoadOptions& options, const v1::ServerInfo& server,
                           const LoadReport& report) {
  const LatencyHistogram& latency = report.latency;
  const TimingSums& sums = report.server;
  const auto requests = static_cast<double>(latency.count());
  std::vector<int32_t> layers;
  for (const v1::LayerInfo& layer : options.layers) layers.push_back(layer.layer());
  nlohmann::ordered_json json;
  json["server"] = {{"address", options.address},     {"version", server.version()},
                    {"commit", server.commit()},      {"model", server.model()},
                    {"backend", server.backend()},    {"backend_detail", server.backend_detail()},
                    {"num_ranks", server.num_ranks()}};
  json["load"] = {{"mode", ModeName(options.mode)},
                  {"concurrency", options.concurrency},
                  {"inflight", options.inflight},
                  {"tokens", options.tokens},
                  {"top_k", options.top_k > 0 ? options.top_k : options.layers.front().top_k()},
                  {"dtype", std::string(DTypeName(options.dtype))},
                  {"layers", layers},
                  {"seed", options.seed}};
  json["elapsed_s"] = absl::ToDoubleSeconds(report.elapsed);
  json["stopped_early"] = report.stopped_early;
  json["requests"] = latency.count();
  json["requests_per_s"] = PerSecond(requests, report);
  json["tokens_per_s"] = PerSecond(requests * options.tokens, report);
  json["latency_us"] = {{"min", latency.min_us()},       {"mean", latency.mean_us()},
                        {"p50", latency.Percentile(50)}, {"p90", latency.Percentile(90)},
                        {"p99", latency.Percentile(99)}, {"max", latency.max_us()}};
  json["server_us"] = {
      {"receive", Mean(sums.receive_us, sums)},   {"queue", Mean(sums.queue_us, sums)},
      {"copy_in", Mean(sums.copy_in_us, sums)},   {"kernel", Mean(sums.kernel_us, sums)},
      {"copy_out", Mean(sums.copy_out_us, sums)}, {"total", Mean(sums.total_us, sums)}};
  json["step_tokens_mean"] = Mean(sums.step_tokens, sums);
  json["num_errors"] = report.num_errors();
  json["errors"] = report.errors;
  json["first_error"] = report.first_error;
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace expertd
