// Times the fused MoE layer from BF16 hidden states, ids and weights in device memory to the
// reduced BF16 rows in device memory, routing, exchange and combine included; on one GPU and, with
// --ranks R, on R of them in the same run (R times the experts, T a rank and K unchanged, the same
// pairs on every GPU as on the one).
//   burst:     median of launches that each follow a read which displaces L2, over several routings
//   sustained: mean of back-to-back launches over a second, when the card has settled at its power
//   limit
// The ceilings (streaming read; the vendor library's BF16 product, if found) are measured in the
// same run. One JSON object a line is appended to --out.
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "tests/bench/moe_layer/ceilings.h"
#include "tests/bench/moe_layer/layer_group.h"
#include "tests/bench/moe_layer/measure.h"
#include "tests/bench/moe_layer/record.h"

namespace expertd::bench {
namespace {

struct Options {
  std::string out, cublas;
  std::string commit = "unknown";
  std::string exchange = "lsa";
  int ranks = 1;
  bool bf16_partials = false;
  bool burst_only = false;
  std::vector<std::string> jobs;
};

struct Job {
  Geometry geometry;
  Recipe recipe;
  std::vector<int> tokens;
};

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Job ParseJob(const std::string& text) {
  const std::vector<std::string> parts = Split(text, ':');
  const Geometry* geometry = FindGeometry(parts[0]);
  Job job;
  bool good = parts.size() == 3 && geometry != nullptr;
  if (good) {
    job = {*geometry, parts[1] == "nvfp4" ? Recipe::kNvfp4 : Recipe::kMxfp4, {}};
    good = parts[1] == "nvfp4" || parts[1] == "mxfp4";
    for (const std::string& tokens : Split(parts[2], ','))
      job.tokens.push_back(std::atoi(tokens.c_str()));
    for (const int tokens : job.tokens) good &= tokens > 0;
  }
  if (!good) {
    std::fprintf(stderr, "%s: expected GEOMETRY:mxfp4|nvfp4:T,T,...\n", text.c_str());
    std::exit(2);
  }
  return job;
}

// What ran before heats the card and lowers its clock: bursts are measured after a rest.
void Idle(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// A group with a row for each T. All bursts come first, then all sustained runs.
class Series {
 public:
  Series(const GroupOptions& options, const std::vector<int>& tokens)
      : group_(options), rows_(tokens.size()) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      group_.SetTokens(tokens[i]);
      Compare(group_, &rows_[i]);
    }
  }

  void Bursts() {
    for (Row& row : rows_) {
      group_.SetTokens(row.tokens);
      Idle(200);
      Burst(group_, &row);
    }
  }
  void SustainedRuns() {
    for (Row& row : rows_) {
      group_.SetTokens(row.tokens);
      Sustain(group_, &row);
    }
  }

  void Report(const RunFacts& facts, const std::string& out, const Series* single) const {
    for (size_t i = 0; i < rows_.size(); ++i) {
      const Row* of_one = single == nullptr ? nullptr : &single->rows_[i];
      Print(facts, group_, rows_[i], of_one);
      if (!out.empty()) Append(out, facts, group_, rows_[i], of_one);
    }
  }

 private:
  LayerGroup group_;
  std::vector<Row> rows_;
};

void RunJob(const RunFacts& facts, const Options& options, const Job& job) {
  GroupOptions group = {.geometry = job.geometry,
                        .recipe = job.recipe,
                        .max_tokens = *std::max_element(job.tokens.begin(), job.tokens.end())};
  Series single(group, job.tokens);
  std::unique_ptr<Series> many;
  if (options.ranks > 1) {
    group.num_ranks = options.ranks;
    group.exchange = options.exchange == "host" ? Exchange::kHost : Exchange::kLsa;
    group.partials_bf16 = options.bf16_partials;
    many = std::make_unique<Series>(group, job.tokens);
  }
  Idle(options.burst_only ? 500 : 2000);
  single.Bursts();
  if (many != nullptr) many->Bursts();
  if (!options.burst_only) {
    single.SustainedRuns();
    if (many != nullptr) many->SustainedRuns();
  }
  single.Report(facts, options.out, nullptr);
  if (many != nullptr) many->Report(facts, options.out, &single);
}

RunFacts Look(const Options& options) {
  Arena arena;
  const Gpu gpu = MakeGpu(arena);
  RunFacts facts = {.gpu = gpu.name, .commit = options.commit, .read_ceiling = ReadCeiling(gpu)};
  if (!options.cublas.empty()) facts.vendor_tflops = VendorTflops(options.cublas);
  std::printf("%s, %d SMs, read ceiling %.0f GB/s, vendor BF16 %.0f TFLOP/s\n", gpu.name.c_str(),
              gpu.num_sms, facts.read_ceiling, facts.vendor_tflops);
  return facts;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times the fused MoE layer on one or several GPUs");
  app.add_option("--out", options.out, "append one JSON object a row to this file");
  app.add_option("--commit", options.commit, "commit that the rows name");
  app.add_option("--cublas", options.cublas, "library of the vendor's BF16 product");
  app.add_option("--ranks", options.ranks, "R: GPUs of the group, beside the single one")
      ->check(CLI::Range(1, 32));
  app.add_option("--exchange", options.exchange, "how R ranks exchange rows")
      ->check(CLI::IsMember({"lsa", "host"}));
  app.add_flag("--bf16-partials", options.bf16_partials, "partial rows cross as BF16");
  app.add_flag("--burst", options.burst_only, "no sustained runs");
  app.add_option("jobs", options.jobs, "GEOMETRY:mxfp4|nvfp4:T,T,...")->required();
  CLI11_PARSE(app, argc, argv);
  std::vector<Job> jobs;
  for (const std::string& text : options.jobs) jobs.push_back(ParseJob(text));
  const RunFacts facts = Look(options);
  for (const Job& job : jobs) RunJob(facts, options, job);
  return 0;
}

}  // namespace
}  // namespace expertd::bench

int main(int argc, char** argv) { return expertd::bench::Main(argc, argv); }
