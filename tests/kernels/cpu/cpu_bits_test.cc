#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/routing.h"
#include "tests/kernels/cpu/cpu_fixture.h"

// A row's bits depend on the row, its routes and the weights: not on its neighbours, the number of
// ranks or threads, the home rank or the moment.
namespace expertd::testing {
namespace {

LayerSpec Spec(Recipe recipe) { return MakeSpec(recipe, 192, 96, 8); }

std::vector<float> RunOn(const RandomExperts& experts, const Placement& placement, const Rows& rows,
                         int32_t num_threads, bool all_on_rank_zero = false) {
  const auto backend = MakeLoaded(experts, placement, 256, num_threads);
  const auto output =
      RunStep(*backend, experts.spec(), rows, {.all_on_rank_zero = all_on_rank_zero});
  EXPECT_TRUE(output.ok()) << output.status();
  return output.ok() ? *output : std::vector<float>{};
}

TEST(CpuBits, AreTheSameForEveryNumberOfRanksAndThreads) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const RandomExperts experts(Spec(recipe), 1);
    Rows rows = RandomRows(experts.spec(), 65, 5, 2);
    rows.ids[17] = -1;
    const std::vector<float> one = RunOn(experts, *Placement::Contiguous(8, 1), rows, 1);
    for (const int32_t num_ranks : {1, 2, 4, 8}) {
      for (const int32_t num_threads : {1, 3, 16}) {
        const Placement placement = *Placement::Contiguous(8, num_ranks);
        EXPECT_TRUE(SameBits(one, RunOn(experts, placement, rows, num_threads)))
            << num_ranks << " ranks, " << num_threads << " threads";
      }
    }
    EXPECT_TRUE(SameBits(one, RunOn(experts, *Placement::Contiguous(8, 4), rows, 4, true)));
  }
}

TEST(CpuBits, DoNotDependOnTheRestOfTheBatch) {
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const RandomExperts experts(Spec(recipe), 3);
    const LayerSpec& spec = experts.spec();
    const auto backend = MakeLoaded(experts, *Placement::Contiguous(8, 2), 256);
    const Rows rows = RandomRows(spec, 257, 4, 4);
    const auto whole = RunStep(*backend, spec, rows, {.step = 0});
    ASSERT_TRUE(whole.ok()) << whole.status();
    uint64_t step = 1;
    for (const int32_t size : {1, 2, 3, 5, 8, 9, 17, 40, 100}) {
      for (int32_t begin = 0; begin < 257; begin += size == 1 ? 37 : size) {
        const int32_t end = std::min(257, begin + size);
        const auto part = RunStep(*backend, spec, Slice(spec, rows, begin, end), {.step = step++});
        ASSERT_TRUE(part.ok()) << part.status();
        EXPECT_TRUE(
            SameBits(*part, absl::MakeConstSpan(*whole).subspan(begin * spec.hidden_size,
                                                                (end - begin) * spec.hidden_size)))
            << "tokens " << begin << " to " << end;
      }
    }
  }
}

TEST(CpuBits, AreTheSameInEveryRun) {
  const RandomExperts experts(Spec(Recipe::kNvfp4), 5);
  const auto backend = MakeLoaded(experts, *Placement::Contiguous(8, 2), 256, 4);
  const Rows rows = RandomRows(experts.spec(), 100, 6, 6);
  const auto first = RunStep(*backend, experts.spec(), rows, {.step = 0});
  ASSERT_TRUE(first.ok()) << first.status();
  for (uint64_t step = 1; step < 20; ++step) {
    const auto again = RunStep(*backend, experts.spec(), rows, {.step = step});
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(SameBits(*first, *again));
  }
}

TEST(CpuBits, AreTheSameWhateverReplicaServesARoute) {
  const RandomExperts experts(Spec(Recipe::kMxfp4), 7);
  const Rows rows = RandomRows(experts.spec(), 33, 4, 8);
  const std::vector<float> one = RunOn(experts, *Placement::Contiguous(8, 1), rows, 2);
  EXPECT_TRUE(SameBits(one, RunOn(experts, *Placement::Redundant(8, 4, 5), rows, 2)));
  EXPECT_TRUE(SameBits(one, RunOn(experts, *Placement::Redundant(8, 3, 8), rows, 2)));
}

TEST(CpuBits, DoNotDependOnRounds) {
  const RandomExperts experts(MakeSpec(Recipe::kMxfp4, 32, 32, 4), 9);
  const LayerSpec& spec = experts.spec();
  const auto backend = MakeLoaded(experts, *Placement::Contiguous(4, 1), 2000);
  const Rows rows = RandomRows(spec, 2000, 8, 10);  // 16000 routes: two rounds
  const auto whole = RunStep(*backend, spec, rows, {.step = 0});
  const auto tail = RunStep(*backend, spec, Slice(spec, rows, 900, 1200), {.step = 1});
  ASSERT_TRUE(whole.ok() && tail.ok());
  EXPECT_TRUE(SameBits(*tail, absl::MakeConstSpan(*whole).subspan(900 * 32, 300 * 32)));
}

// Passes everything on and counts what crosses between ranks.
class CountingExchange final : public Exchange {
 public:
  explicit CountingExchange(int32_t num_ranks) : inner_(MakeInProcessExchange(num_ranks)) {}

  int32_t num_ranks() const override { return inner_->num_ranks(); }
  absl::Status AllToAll(int32_t rank, const ExchangeTag& tag,
                        absl::Span<const absl::Span<const uint8_t>> send,
                        absl::Span<const absl::Span<uint8_t>> receive,
                        absl::Span<size_t> received_bytes, absl::Time deadline) override {
    absl::Status status = inner_->AllToAll(rank, tag, send, receive, received_bytes, deadline);
    std::lock_guard lock(mutex_);
    for (int32_t peer = 0; peer < num_ranks(); ++peer) {
      if (peer == rank) continue;
      if (tag.phase == ExchangePhase::kDispatch) {
        cpu::DispatchHeader header;
        EXPECT_GE(send[peer].size(), sizeof(header));
        std::memcpy(&header, send[peer].data(), sizeof(header));
        dispatched_rows += header.num_rows;
        routes += header.num_routes;
        dispatch_bytes += static_cast<int64_t>(send[peer].size()) - int64_t{sizeof(header)};
      } else {
        combine_bytes += static_cast<int64_t>(send[peer].size());
      }
    }
    return status;
  }
  void Abort(const absl::Status& reason) override { inner_->Abort(reason); }

  int64_t dispatched_rows = 0;
  int64_t routes = 0;
  int64_t dispatch_bytes = 0;
  int64_t combine_bytes = 0;

 private:
  std::shared_ptr<Exchange> inner_;
  std::mutex mutex_;
};

TEST(CpuExchange, ATokenCrossesOnceForEachOtherRankThatServesIt) {
  constexpr int32_t kRanks = 4;
  const RandomExperts experts(Spec(Recipe::kMxfp4), 11);
  const LayerSpec& spec = experts.spec();
  const Placement placement = *Placement::Redundant(8, kRanks, 3);
  const auto exchange = std::make_shared<CountingExchange>(kRanks);
  cpu::CpuBackendOptions options;
  options.common.placement = std::make_shared<const Placement>(placement);
  options.common.max_tokens_per_rank = 64;
  options.exchange = exchange;
  const auto backend = MakeLoaded(experts, options);
  Rows rows = RandomRows(spec, 50, 6, 12);
  rows.ids[3] = rows.ids[40] = -1;
  ASSERT_TRUE(RunStep(*backend, spec, rows).ok());

  int64_t expected_rows = 0;
  int64_t expected_routes = 0;
  for (int32_t token = 0; token < rows.num_tokens; ++token) {
    std::set<int32_t> ranks;
    for (int32_t k = 0; k < rows.top_k; ++k) {
      const int32_t expert = rows.ids[token * rows.top_k + k];
      if (expert < 0) continue;
      const int32_t rank = placement.SlotFor(expert, token) / placement.slots_per_rank();
      if (rank == token % kRanks) continue;  // at home: never on the wire
      ranks.insert(rank);
      ++expected_routes;
    }
    expected_rows += static_cast<int64_t>(ranks.size());
  }
  EXPECT_LT(expected_rows, expected_routes);  // some tokens do share a rank
  EXPECT_EQ(exchange->dispatched_rows, expected_rows);
  EXPECT_EQ(exchange->routes, expected_routes);
  EXPECT_EQ(exchange->dispatch_bytes, expected_rows * spec.hidden_size * 2 + expected_routes * 8);
  EXPECT_EQ(exchange->combine_bytes, expected_routes * spec.hidden_size * 4);
}

}  // namespace
}  // namespace expertd::testing
