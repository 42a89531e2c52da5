// One MoE step on the CPU backend, from Submit to its callback, against what the machine can do at
// best.
//
//   cpu_moe_bench [--results FILE] [--threads N] [--commit ID] [--smoke] [Google Benchmark's flags]
//
// Work of a step: FLOPs = routes * 3 matrices * 2 * H * I; weight bytes = experts that have a route
// * the codes and scales of their three matrices. Two ceilings are measured in the same run by the
// same number of threads, before and after the cases; the better value of each counts. The nearer
// ceiling is the one that would take longer for the step's work; `percent` is that time over the
// time taken.
// --results appends a JSON line a case; --smoke runs a tiny geometry once, to see that it works.

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <future>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "config/check.h"
#include "kernels/backend.h"
#include "kernels/cpu/fp4_gemm.h"
#include "kernels/formats.h"
#include "tests/bench/cpu_ceilings.h"

namespace expertd::bench {
namespace {

constexpr int kNumRoutings =
    8;  // a step differs from the one before, so the cache holds little of it

struct Flags {
  std::string results;
  std::string commit = "unknown";
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  bool smoke = false;
};

struct Case {
  Recipe recipe;
  int32_t num_tokens;
};

LayerSpec SpecOf(const Flags& flags, Recipe recipe) {
  LayerSpec spec;  // DeepSeek-V4 Flash with 16 of its experts
  spec.hidden_size = flags.smoke ? 256 : 4096;
  spec.intermediate_size = flags.smoke ? 128 : 2048;
  spec.num_experts = 16;
  spec.top_k = 6;
  spec.recipe = recipe;
  spec.swiglu_limit = 10;
  return spec;
}

int64_t ExpertBytes(const LayerSpec& spec) {
  int64_t bytes = 0;
  for (int m = 0; m < kNumMatrices; ++m) {
    const MatrixShape shape = ShapeOf(spec, static_cast<Matrix>(m));
    bytes += shape.CodeBytes() + shape.ScaleBytes(spec.recipe);
  }
  return bytes;
}

std::unique_ptr<Backend> MakeBackend(const Flags& flags, const LayerSpec& spec,
                                     int32_t max_tokens) {
  BackendOptions options;
  options.layers = {spec};
  options.placement =
      std::make_shared<const Placement>(*Placement::Contiguous(spec.num_experts, 1));
  options.max_tokens_per_rank = max_tokens;
  options.num_threads = flags.threads;
  auto backend = MakeCpuBackend(options);
  EXPERTD_CHECK(backend.ok());
  std::mt19937_64 random(1);
  for (int32_t slot = 0; slot < spec.num_experts; ++slot) {
    for (int m = 0; m < kNumMatrices; ++m) {
      const MatrixId id{0, spec.layer, slot, static_cast<Matrix>(m)};
      const auto buffers = (*backend)->sink().Reserve(id, absl::InfiniteFuture());
      EXPERTD_CHECK(buffers.ok());
      for (size_t i = 0; i + 8 <= buffers->codes.size(); i += 8) {
        const uint64_t bits = random();
        std::memcpy(buffers->codes.data() + i, &bits, 8);
      }
      for (uint8_t& scale : buffers->scales) {
        scale = static_cast<uint8_t>(spec.recipe == Recipe::kMxfp4 ? 118 + random() % 4
                                                                   : 8 + random() % 16);
      }
      EXPERTD_CHECK((*backend)->sink().Commit(id, 1.0f).ok());
    }
  }
  EXPERTD_CHECK((*backend)->sink().Finish().ok());
  return *std::move(backend);
}

struct Work {
  double weight_bytes = 0;  // mean over the routings
  double flops = 0;
};

// Different experts for the choices of a token, uniformly.
std::vector<int32_t> RandomIds(const LayerSpec& spec, int32_t num_tokens, std::mt19937_64& random) {
  std::vector<int32_t> ids;
  for (int32_t token = 0; token < num_tokens; ++token) {
    std::vector<int32_t> experts(spec.num_experts);
    for (int32_t e = 0; e < spec.num_experts; ++e) experts[e] = e;
    std::shuffle(experts.begin(), experts.end(), random);
    ids.insert(ids.end(), experts.begin(), experts.begin() + spec.top_k);
  }
  return ids;
}

void RunCase(benchmark::State& state, const Flags& flags, const Case& bench_case) {
  const LayerSpec spec = SpecOf(flags, bench_case.recipe);
  const auto backend = MakeBackend(flags, spec, bench_case.num_tokens);
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  std::vector<std::vector<int32_t>> routings;
  Work work;
  for (int i = 0; i < kNumRoutings; ++i) {
    routings.push_back(RandomIds(spec, bench_case.num_tokens, random));
    const std::set<int32_t> experts(routings.back().begin(), routings.back().end());
    work.weight_bytes +=
        static_cast<double>(experts.size()) * static_cast<double>(ExpertBytes(spec)) / kNumRoutings;
  }
  work.flops = 6.0 * bench_case.num_tokens * spec.top_k * static_cast<double>(spec.hidden_size) *
               static_cast<double>(spec.intermediate_size);

  StepMemory* memory = *backend->AcquireStep(absl::InfiniteFuture());
  MoeStep step;
  step.top_k = spec.top_k;
  step.ranks = memory->ranks;
  RankBatch& batch = step.ranks[0];
  batch.num_tokens = bench_case.num_tokens;
  for (int64_t i = 0; i < batch.num_tokens * spec.hidden_size; ++i) {
    static_cast<uint16_t*>(batch.hidden)[i] = FloatToBf16(normal(random));
  }
  for (int32_t i = 0; i < batch.num_tokens * spec.top_k; ++i) batch.weights[i] = 0.2f;
  for (int32_t i = 0; i < batch.num_tokens; ++i) batch.row_in_request[i] = i;
  for (auto _ : state) {
    const std::vector<int32_t>& ids = routings[step.step % kNumRoutings];
    std::copy(ids.begin(), ids.end(), batch.ids);
    std::promise<void> done;
    const absl::Status status = backend->Submit(step, [&](StepResult result) {
      EXPERTD_CHECK(result.status.ok());
      done.set_value();
    });
    EXPERTD_CHECK(status.ok());
    done.get_future().wait();
    ++step.step;
  }
  backend->ReleaseStep(memory);
  state.counters["weight_bytes"] = work.weight_bytes;
  state.counters["flops"] = work.flops;
}

// Keeps what the console shows, so that the ceilings measured afterwards can be put beside it.
class KeepingReporter : public benchmark::ConsoleReporter {
 public:
  KeepingReporter() : ConsoleReporter(OO_Tabular) {}
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) kept.push_back(run);
    ConsoleReporter::ReportRuns(runs);
  }
  std::vector<Run> kept;
};

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string Date() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

nlohmann::ordered_json Line(const Flags& flags, const Ceilings& best, double load,
                            const benchmark::BenchmarkReporter::Run& run) {
  const double seconds = run.GetAdjustedRealTime() * 1e-6;
  const double bytes = run.counters.at("weight_bytes");
  const double flops = run.counters.at("flops");
  const double read_s = bytes / (best.read_gb_per_s * 1e9);
  const double fma_s = flops / (best.fma_gflop_per_s * 1e9);
  nlohmann::ordered_json line;
  line["date"] = Date();
  line["commit"] = flags.commit;
  line["cpu"] = CpuName();
  line["instruction_set"] = cpu::InstructionSet();
  line["threads"] = flags.threads;
  line["load_before"] = load;
  line["case"] = run.run_name.function_name;
  line["iterations"] = run.iterations;
  line["step_us"] = seconds * 1e6;
  line["weight_bytes"] = bytes;
  line["flops"] = flops;
  line["gb_per_s"] = bytes / seconds * 1e-9;
  line["gflop_per_s"] = flops / seconds * 1e-9;
  line["ceiling_read_gb_per_s"] = best.read_gb_per_s;
  line["ceiling_fma_gflop_per_s"] = best.fma_gflop_per_s;
  line["nearer"] = read_s > fma_s ? "read" : "fma";
  line["percent"] = 100 * std::max(read_s, fma_s) / seconds;
  return line;
}

Flags TakeFlags(int* argc, char** argv) {
  Flags flags;
  int kept = 1;
  for (int i = 1; i < *argc; ++i) {
    const std::string flag = argv[i];
    const bool has_value = i + 1 < *argc;
    if (flag == "--smoke") {
      flags.smoke = true;
    } else if (flag == "--results" && has_value) {
      flags.results = argv[++i];
    } else if (flag == "--commit" && has_value) {
      flags.commit = argv[++i];
    } else if (flag == "--threads" && has_value) {
      flags.threads = std::atoi(argv[++i]);
    } else {
      argv[kept++] = argv[i];
    }
  }
  *argc = kept;
  return flags;
}

int Main(int argc, char** argv) {
  const Flags flags = TakeFlags(&argc, argv);
  benchmark::Initialize(&argc, argv);
  if (flags.threads < 1 || benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    for (const int32_t num_tokens : {1, 8, 64, 512}) {
      const std::string name = std::string(RecipeName(recipe)) + "/T=" + std::to_string(num_tokens);
      auto* registered = benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        RunCase(state, flags, {recipe, num_tokens});
      });
      registered->UseRealTime()->Unit(benchmark::kMicrosecond);
      if (flags.smoke) registered->Iterations(1);
    }
  }
  double load = 0;
  (void)getloadavg(&load, 1);
  const double seconds = flags.smoke ? 0.01 : 1.0;
  const Ceilings before = MeasureCeilings(flags.threads, seconds, flags.smoke);
  KeepingReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  const Ceilings after = MeasureCeilings(flags.threads, seconds, flags.smoke);
  const Ceilings best = {std::max(before.read_gb_per_s, after.read_gb_per_s),
                         std::max(before.fma_gflop_per_s, after.fma_gflop_per_s)};
  std::cout << "ceilings: read " << before.read_gb_per_s << " and " << after.read_gb_per_s
            << " GB/s, fma " << before.fma_gflop_per_s << " and " << after.fma_gflop_per_s
            << " GFLOP/s\n";
  std::ofstream results;
  if (!flags.results.empty()) results.open(flags.results, std::ios::app);
  for (const auto& run : reporter.kept) {
    const nlohmann::ordered_json line = Line(flags, best, load, run);
    std::printf("%-12s %10.0f us %7.2f GB/s %7.1f GFLOP/s: %5.1f %% of %s\n",
                std::string(line["case"]).c_str(), double{line["step_us"]},
                double{line["gb_per_s"]}, double{line["gflop_per_s"]}, double{line["percent"]},
                std::string(line["nearer"]).c_str());
    if (results.is_open()) results << line.dump() << '\n';
  }
  benchmark::Shutdown();
  return results.good() ? 0 : 1;
}

}  // namespace
}  // namespace expertd::bench

int main(int argc, char** argv) { return expertd::bench::Main(argc, argv); }
