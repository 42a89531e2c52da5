#include "tests/bench/moe_layer/record.h"

#include <cmath>
#include <ctime>

#include "nlohmann/json.hpp"

namespace expertd::bench {
namespace {

const char* ExchangeName(Exchange exchange) { return exchange == Exchange::kLsa ? "lsa" : "host"; }

double Round(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

// Null where there was no such run.
nlohmann::ordered_json Measured(double value, int digits) {
  if (value == 0) return nullptr;
  if (digits == 0) return std::lround(value);
  return Round(value, digits);
}

std::string Now() {
  char date[64];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return date;
}

nlohmann::ordered_json ToJson(const RunFacts& facts, const LayerGroup& group, const Row& row,
                              const Row* single) {
  const GroupOptions& options = group.options();
  nlohmann::ordered_json json = {{"bench", "moe_layer"},
                                 {"geometry", options.geometry.name},
                                 {"recipe", std::string(RecipeName(options.recipe))},
                                 {"activations", "bf16"},
                                 {"ranks", options.num_ranks},
                                 {"tokens", row.tokens},
                                 {"us_median", Round(row.us_median, 1)},
                                 {"us_min", Round(row.us_min, 1)},
                                 {"us_sustained", Measured(row.us_sustained, 1)},
                                 {"sm_mhz", std::lround(row.mhz)},
                                 {"sm_mhz_sustained", Measured(row.mhz_sustained, 0)},
                                 {"gb_per_s", std::lround(row.weight_bytes / row.us_median * 1e-3)},
                                 {"tflops", Round(row.flops / row.us_median * 1e-6, 1)},
                                 {"weight_bytes", std::llround(row.weight_bytes)},
                                 {"rel_err", Round(row.rel_err, 5)},
                                 {"read_ceiling_gb_per_s", std::lround(facts.read_ceiling)},
                                 {"vendor_bf16_tflops", nullptr},
                                 {"workspace_bytes", row.workspace_bytes},
                                 {"token_tile", row.config.token_tile},
                                 {"stages", row.config.num_stages}};
  if (facts.vendor_tflops > 0) json["vendor_bf16_tflops"] = std::lround(facts.vendor_tflops);
  if (options.num_ranks > 1) {
    json["exchange"] = ExchangeName(options.exchange);
    json["partials"] = options.partials_bf16 ? "bf16" : "f32";
    json["link_bytes"] = std::llround(row.link_bytes);
    json["link_gb_per_s"] = Round(row.link_bytes / row.us_median * 1e-3, 1);
    if (single != nullptr) json["us_single"] = Round(single->us_median, 1);
    if (single != nullptr) json["us_single_sustained"] = Measured(single->us_sustained, 1);
  }
  json["gpu"] = facts.gpu;
  json["date"] = Now();
  json["commit"] = facts.commit;
  return json;
}

}  // namespace

void Print(const RunFacts& facts, const LayerGroup& group, const Row& row, const Row* single) {
  const GroupOptions& options = group.options();
  std::printf("%-10s %s R %d T %-5d %8.1f us (min %.1f)", options.geometry.name,
              std::string(RecipeName(options.recipe)).c_str(), options.num_ranks, row.tokens,
              row.us_median, row.us_min);
  if (single != nullptr) {
    std::printf(" = one GPU %+.1f us (%+.1f %%)", row.us_median - single->us_median,
                100 * (row.us_median / single->us_median - 1));
  }
  std::printf(" %5.0f GB/s = %5.1f%% %6.1f TFLOP/s | sustained %8.1f us",
              row.weight_bytes / row.us_median * 1e-3,
              row.weight_bytes / row.us_median * 1e-1 / facts.read_ceiling,
              row.flops / row.us_median * 1e-6, row.us_sustained);
  if (single != nullptr && single->us_sustained > 0) {
    std::printf(" (%+.1f %%)", 100 * (row.us_sustained / single->us_sustained - 1));
  }
  if (options.num_ranks > 1) {
    std::printf(" | %s, %s partials, link %.2f MB a direction, %.0f GB/s",
                ExchangeName(options.exchange), options.partials_bf16 ? "bf16" : "f32",
                row.link_bytes * 1e-6, row.link_bytes / row.us_median * 1e-3);
  }
  std::printf(" | SM %.0f / %.0f MHz | error %.2e | %s | workspace %.1f MB\n", row.mhz,
              row.mhz_sustained, row.rel_err, row.config.ToString().c_str(),
              static_cast<double>(row.workspace_bytes) * 1e-6);
  std::fflush(stdout);
}

void Append(const std::string& path, const RunFacts& facts, const LayerGroup& group, const Row& row,
            const Row* single) {
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) {
    std::fprintf(stderr, "%s: cannot be written\n", path.c_str());
    std::exit(1);
  }
  std::fprintf(file, "%s\n", ToJson(facts, group, row, single).dump(-1).c_str());
  std::fclose(file);
}

}  // namespace expertd::bench
