#include "tests/bench/moe_layer/measure.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/cuda/moe_layer/traits.h"
#include "kernels/formats.h"

namespace expertd::bench {
namespace {

namespace moe_layer = cuda::moe_layer;

constexpr int kComparedRoutings = 3;
constexpr int kReferenceRows = 32;  // of every rank
constexpr double kSustainSeconds = 1.0;

// Runs work(rank, stream) on all ranks; errors end the program.
template <typename Work>
void ForEach(LayerGroup& group, Work work) {
  BENCH_CHECK(group.site().ForEach([&](int rank, cudaStream_t stream) {
    work(rank, stream);
    return absl::OkStatus();
  }));
}

std::vector<std::unique_ptr<StreamTimer>> MakeTimers(LayerGroup& group) {
  std::vector<std::unique_ptr<StreamTimer>> timers(group.options().num_ranks);
  ForEach(group, [&](int rank, cudaStream_t) { timers[rank] = std::make_unique<StreamTimer>(); });
  return timers;
}

double SlowestClock(LayerGroup& group) {
  std::vector<double> mhz(group.options().num_ranks);
  ForEach(group,
          [&](int rank, cudaStream_t stream) { mhz[rank] = SmMhz(group.gpu(rank), stream); });
  return *std::min_element(mhz.begin(), mhz.end());
}

// One launch on every rank behind a read that displaces L2 and a meeting of all ranks.
double BurstUs(LayerGroup& group, int routing,
               const std::vector<std::unique_ptr<StreamTimer>>& timers) {
  const uint32_t step = group.TakeSteps(1);
  std::vector<double> us(timers.size());
  ForEach(group, [&](int rank, cudaStream_t stream) {
    DisplaceL2(group.gpu(rank), stream);
    group.Meet(rank, step, stream);
    timers[rank]->Begin(stream);
    group.Launch(rank, routing, step, stream);
    timers[rank]->End(stream);
    group.Finish(rank);
    us[rank] = timers[rank]->Us();
  });
  return *std::max_element(us.begin(), us.end());
}

void PrintMark(const char* name, std::vector<double> us) {
  std::sort(us.begin(), us.end());
  std::printf("    %-10s first %7.1f median %7.1f last %7.1f us", name, us.front(),
              us[us.size() / 2], us.back());
}

// Where the time of one launch goes, per mark over the CTAs of a rank, since its first CTA's start.
void PrintMarks(const LayerGroup& group, int rank, const std::vector<uint64_t>& marks) {
  const size_t ctas = marks.size() / moe_layer::kTimingMarks;
  const auto at = [&](size_t cta, int mark) { return marks[cta * moe_layer::kTimingMarks + mark]; };
  uint64_t start = ~0ull;
  for (size_t c = 0; c < ctas; ++c) start = std::min(start, at(c, moe_layer::kMarkStart));
  const std::pair<int, const char*> names[] = {
      {moe_layer::kMarkStart, "start"},     {moe_layer::kMarkRouted, "routed"},
      {moe_layer::kMarkSent, "sent"},       {moe_layer::kMarkLastTile, "list end"},
      {moe_layer::kMarkCombine, "combine"}, {moe_layer::kMarkOutputs, "outputs"},
      {moe_layer::kMarkEnd, "end"}};
  std::printf("  rank %d\n", rank);
  for (const auto& [mark, name] : names) {
    std::vector<double> us;
    for (size_t c = 0; c < ctas; ++c) {
      if (at(c, mark) != 0) us.push_back(static_cast<double>(at(c, mark) - start) * 1e-3);
    }
    if (us.empty()) continue;
    PrintMark(name, us);
    if (mark == moe_layer::kMarkSent && group.options().num_ranks > 1) {
      std::printf("  %.0f GB/s out",
                  group.dispatch_bytes() / *std::max_element(us.begin(), us.end()) * 1e-3);
    }
    std::printf("\n");
  }
}

void PrintTiming(LayerGroup& group) {
  const uint32_t step = group.TakeSteps(1);
  std::vector<std::vector<uint64_t>> marks(group.options().num_ranks);
  ForEach(group, [&](int rank, cudaStream_t stream) {
    Arena arena;
    marks[rank].resize(group.config().num_ctas * moe_layer::kTimingMarks);
    uint64_t* const timing = arena.Device(marks[rank]);
    BENCH_CHECK(cudaDeviceSynchronize());
    DisplaceL2(group.gpu(rank), stream);
    group.Meet(rank, step, stream);
    group.Launch(rank, 0, step, stream, timing);
    group.Finish(rank);
    BENCH_CHECK(cudaStreamSynchronize(stream));
    BENCH_CHECK(
        cudaMemcpy(marks[rank].data(), timing, marks[rank].size() * 8, cudaMemcpyDeviceToHost));
  });
  for (int rank = 0; rank < group.options().num_ranks; ++rank) {
    PrintMarks(group, rank, marks[rank]);
  }
}

// BF16 [T, H] of a rank after one step from NaN.
std::vector<std::vector<uint16_t>> OutputsOf(LayerGroup& group, int routing) {
  const uint32_t step = group.TakeSteps(1);
  const int64_t elements = int64_t{group.tokens()} * group.options().geometry.hidden;
  std::vector<std::vector<uint16_t>> outputs(group.options().num_ranks);
  ForEach(group, [&](int rank, cudaStream_t stream) {
    BENCH_CHECK(cudaMemsetAsync(group.output(rank), 0xff, elements * 2, stream));
    group.Launch(rank, routing, step, stream);
    group.Finish(rank);
    BENCH_CHECK(cudaStreamSynchronize(stream));
    outputs[rank].resize(elements);
    BENCH_CHECK(
        cudaMemcpy(outputs[rank].data(), group.output(rank), elements * 2, cudaMemcpyDeviceToHost));
  });
  group.CheckFaults();
  return outputs;
}

double RelErr(LayerGroup& group, int routing) {
  const int hidden = group.options().geometry.hidden;
  const auto outputs = OutputsOf(group, routing);
  for (const auto& output : outputs) {
    for (const uint16_t value : output) {
      if ((value & 0x7fff) > 0x7f80) return NAN;
    }
  }
  const int first = group.tokens() - std::min(group.tokens(), kReferenceRows);
  std::vector<std::vector<float>> partials(outputs.size());
  ForEach(group, [&](int rank, cudaStream_t stream) {
    partials[rank] = group.PlainPartials(rank, routing, first, stream);
  });
  const int64_t sampled = int64_t{group.tokens() - first} * hidden;
  double difference = 0, norm = 0;
  for (size_t home = 0; home < outputs.size(); ++home) {
    for (int64_t i = 0; i < sampled; ++i) {
      double want = 0;
      for (const auto& part : partials) want += part[home * sampled + i];
      const double d = Bf16ToFloat(outputs[home][int64_t{first} * hidden + i]) - want;
      difference += d * d;
      norm += want * want;
    }
  }
  return std::sqrt(difference / norm);
}

}  // namespace

void Compare(LayerGroup& group, Row* row) {
  row->tokens = group.tokens();
  row->config = group.config();
  row->workspace_bytes = group.workspace_bytes();
  row->weight_bytes = group.weight_bytes();
  row->flops = group.flops();
  row->link_bytes = group.link_bytes();
  for (int routing = 0; routing < kComparedRoutings; ++routing) {
    const double error = RelErr(group, routing);
    if (!(error < row->rel_err)) row->rel_err = error;  // NaN stays
  }
}

void Burst(LayerGroup& group, Row* row) {
  const auto timers = MakeTimers(group);
  std::vector<double> us;
  for (int routing = 0; routing < kRoutings; ++routing) {
    us.push_back(BurstUs(group, routing, timers));
    if (routing == kRoutings / 2) row->mhz = SlowestClock(group);
  }
  row->us_median = Median(us);
  row->us_min = *std::min_element(us.begin(), us.end());
  if (moe_layer::kRecordTiming && group.options().exchange == Exchange::kLsa) PrintTiming(group);
  group.CheckFaults();
}

void Sustain(LayerGroup& group, Row* row) {
  const int per_half = std::max(3, static_cast<int>(kSustainSeconds / 2 / (row->us_median * 1e-6)));
  const int measured = per_half / kRoutings * kRoutings;
  const uint32_t first = group.TakeSteps(per_half + measured);
  const auto timers = MakeTimers(group);
  BENCH_CHECK(
      group.site().ForEachStep(per_half + measured, [&](int rank, int index, cudaStream_t stream) {
        if (index == per_half) timers[rank]->Begin(stream);
        group.Launch(rank, index % kRoutings, first + static_cast<uint32_t>(index), stream);
        group.Finish(rank);
        if (index + 1 == per_half + measured) timers[rank]->End(stream);
        return absl::OkStatus();
      }));
  row->us_sustained = 0;
  for (const auto& timer : timers) {
    row->us_sustained = std::max(row->us_sustained, timer->Us() / measured);
  }
  row->mhz_sustained = SlowestClock(group);
  group.CheckFaults();
}

}  // namespace expertd::bench
