#include "tests/bench/cpu_ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/cpu_ceilings.cc"
#include "hwy/foreach_target.h"
// highway.h has to follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace expertd::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Returns the FLOPs done; twelve independent chains hide the latency of a multiply-add.
HWY_NOINLINE double RunFma(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999f);
  const auto b = hn::Set(d, 0.001f);
  // Different starts: the compiler runs equal chains once.
  auto s0 = hn::Set(d, 1.0f), s1 = hn::Set(d, 1.1f), s2 = hn::Set(d, 1.2f), s3 = hn::Set(d, 1.3f);
  auto s4 = hn::Set(d, 1.4f), s5 = hn::Set(d, 1.5f), s6 = hn::Set(d, 1.6f), s7 = hn::Set(d, 1.7f);
  auto s8 = hn::Set(d, 1.8f), s9 = hn::Set(d, 1.9f), s10 = hn::Set(d, 2.0f), s11 = hn::Set(d, 2.1f);
  for (int64_t i = 0; i < rounds; ++i) {
    s0 = hn::MulAdd(s0, a, b);
    s1 = hn::MulAdd(s1, a, b);
    s2 = hn::MulAdd(s2, a, b);
    s3 = hn::MulAdd(s3, a, b);
    s4 = hn::MulAdd(s4, a, b);
    s5 = hn::MulAdd(s5, a, b);
    s6 = hn::MulAdd(s6, a, b);
    s7 = hn::MulAdd(s7, a, b);
    s8 = hn::MulAdd(s8, a, b);
    s9 = hn::MulAdd(s9, a, b);
    s10 = hn::MulAdd(s10, a, b);
    s11 = hn::MulAdd(s11, a, b);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)),
                           hn::Add(hn::Add(hn::Add(s4, s5), hn::Add(s6, s7)),
                                   hn::Add(hn::Add(s8, s9), hn::Add(s10, s11))));
  *sink = hn::GetLane(hn::SumOfLanes(d, sum));
  return 12.0 * 2.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

HWY_NOINLINE uint32_t ReadAll(const uint32_t* data, int64_t count) {
  const hn::ScalableTag<uint32_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    s0 = hn::Xor(s0, hn::Load(d, data + i));
    s1 = hn::Xor(s1, hn::Load(d, data + i + lanes));
    s2 = hn::Xor(s2, hn::Load(d, data + i + 2 * lanes));
    s3 = hn::Xor(s3, hn::Load(d, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::Xor(hn::Xor(s0, s1), hn::Xor(s2, s3)));
}

}  // namespace expertd::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/mapped_memory.h"

namespace expertd::bench {

HWY_EXPORT(RunFma);
HWY_EXPORT(ReadAll);

namespace {

std::atomic<uint64_t> result_sink{0};  // the compiler may not drop what reaches it

double SecondsOf(int num_threads, const std::function<void(int)>& body) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(body, i);
  body(0);
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best rate of passes for `seconds`; pass() returns the work of all threads.
double BestRate(int num_threads, double seconds, double work_of_pass,
                const std::function<void(int)>& pass) {
  double best = 0;
  for (double spent = 0; spent < seconds;) {
    const double took = SecondsOf(num_threads, pass);
    best = std::max(best, work_of_pass / took);
    spent += took;
  }
  return best;
}

}  // namespace

Ceilings MeasureCeilings(int num_threads, double seconds, bool small_buffer) {
  Ceilings ceilings;
  const size_t bytes_per_thread =
      (small_buffer ? size_t{1} << 20 : size_t{512} << 20) / num_threads;
  const size_t count = bytes_per_thread / 4 / 64 * 64;
  const auto memory = MappedMemory::Create(count * 4 * num_threads, "the streaming read");
  if (!memory.ok()) return ceilings;
  auto* data = reinterpret_cast<uint32_t*>(memory->data());
  SecondsOf(num_threads, [&](int i) { std::fill_n(data + i * count, count, 1u + i); });
  ceilings.read_gb_per_s =
      1e-9 * BestRate(num_threads, seconds, 4.0 * count * num_threads, [&](int i) {
        result_sink += HWY_DYNAMIC_DISPATCH(ReadAll)(data + i * count, count);
      });
  constexpr int64_t kRounds = 4'000'000;
  std::vector<double> flops(num_threads);
  const auto fma = [&](int i) {
    float sum;
    flops[i] = HWY_DYNAMIC_DISPATCH(RunFma)(kRounds, &sum);
    result_sink += static_cast<uint64_t>(sum);
  };
  fma(0);
  ceilings.fma_gflop_per_s = 1e-9 * BestRate(num_threads, seconds, flops[0] * num_threads, fma);
  return ceilings;
}

}  // namespace expertd::bench
#endif  // HWY_ONCE
