#include "tests/gpu/testing/moe_cases.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <thread>

#include "config/check.h"
#include "kernels/formats.h"

namespace expertd::testing {
namespace {

// Fast enough to fill gigabytes; quality is beside the point.
class SplitMix {
 public:
  using result_type = uint64_t;

  explicit SplitMix(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t{0}; }
  uint64_t operator()() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t Below(int64_t bound) { return static_cast<int64_t>((*this)() % bound); }

 private:
  uint64_t state_;
};

// The scale byte of a block, about 2^-spread..2^spread times 1 / (2.6 sqrt(in)): 2.6 is the root
// mean square of a random E2M1 code.
uint8_t RandomScale(Recipe recipe, int64_t in, SplitMix& random) {
  if (recipe == Recipe::kMxfp4) {
    const int centre = static_cast<int>(std::lround(-std::log2(2.6 * std::sqrt(in))));
    return static_cast<uint8_t>(127 + centre - 1 + random.Below(3));
  }
  return static_cast<uint8_t>(0x34 + random.Below(0x10));  // 0.75 .. 2.75
}

void FillMatrix(const LayerSpec& spec, Matrix matrix, uint64_t seed, uint8_t* codes,
                uint8_t* scales) {
  const MatrixShape shape = ShapeOf(spec, matrix);
  const int64_t group = ScaleGroup(spec.recipe);
  SplitMix random(seed);
  for (int64_t i = 0; i < shape.CodeBytes(); i += 8) {
    const uint64_t word = random();
    const int64_t count = std::min<int64_t>(8, shape.CodeBytes() - i);
    for (int64_t j = 0; j < count; ++j) codes[i + j] = static_cast<uint8_t>(word >> (8 * j));
  }
  for (int64_t block = 0; block < shape.ScaleBytes(spec.recipe); ++block) {
    scales[block] = RandomScale(spec.recipe, shape.in, random);
    if (random.Below(64) != 0) continue;
    // A zero block: +0 and -0 codes; MXFP4 files carry scale byte 0 there.
    if (spec.recipe == Recipe::kMxfp4 && random.Below(2) == 0) scales[block] = 0;
    const uint64_t signs = random();
    for (int64_t j = 0; j < group / 2; ++j) {
      codes[block * (group / 2) + j] = static_cast<uint8_t>((signs >> j) & 0x88);
    }
  }
}

int32_t RandomExpert(const LayerSpec& spec, Routing routing, SplitMix& random) {
  switch (routing) {
    case Routing::kSkewed: {
      const double u = static_cast<double>(random() >> 11) * 0x1p-53;
      return static_cast<int32_t>(u * u * u * u * spec.num_experts);
    }
    case Routing::kOneExpert:
      return spec.num_experts - 1;
    case Routing::kAllMasked:
      return -1;
    case Routing::kMasked:
      if (random.Below(2) == 0) return -1;
      [[fallthrough]];
    case Routing::kUniform:
      return static_cast<int32_t>(random.Below(spec.num_experts));
  }
  return -1;
}

// K different experts by a partial shuffle, as a router picks them.
void DifferentExperts(int32_t num_experts, absl::Span<int32_t> row, std::vector<int32_t>& scratch,
                      SplitMix& random) {
  scratch.resize(num_experts);
  std::iota(scratch.begin(), scratch.end(), 0);
  for (size_t k = 0; k < row.size(); ++k) {
    std::swap(scratch[k], scratch[k + random.Below(num_experts - static_cast<int64_t>(k))]);
    row[k] = scratch[k];
  }
}

// task(0) .. task(count - 1), on as many threads as there are cores.
void InParallel(int32_t count, const std::function<void(int32_t)>& task) {
  std::atomic<int32_t> next = 0;
  const auto work = [&] {
    for (int32_t i = next++; i < count; i = next++) task(i);
  };
  std::vector<std::thread> threads;
  const int32_t cores = static_cast<int32_t>(std::thread::hardware_concurrency());
  for (int32_t i = 1; i < std::min(cores, count); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

reference::MatrixView HostLayer::View(int32_t expert, Matrix matrix) const {
  const int m = static_cast<int>(matrix);
  const MatrixShape shape = ShapeOf(spec, matrix);
  const int64_t scale_bytes = shape.ScaleBytes(spec.recipe);
  return {absl::MakeConstSpan(codes[m]).subspan(expert * shape.CodeBytes(), shape.CodeBytes()),
          absl::MakeConstSpan(scales[m]).subspan(expert * scale_bytes, scale_bytes),
          second_level[static_cast<size_t>(expert) * kNumMatrices + m]};
}

std::vector<reference::ExpertView> HostLayer::Experts() const {
  std::vector<reference::ExpertView> experts(spec.num_experts);
  for (int32_t e = 0; e < spec.num_experts; ++e) {
    for (int m = 0; m < kNumMatrices; ++m) {
      experts[e].matrices[m] = View(e, static_cast<Matrix>(m));
    }
  }
  return experts;
}

HostLayer MakeRandomLayer(const LayerSpec& spec, uint64_t seed) {
  HostLayer layer;
  layer.spec = spec;
  layer.second_level.resize(static_cast<size_t>(spec.num_experts) * kNumMatrices, 1.0f);
  for (int m = 0; m < kNumMatrices; ++m) {
    const MatrixShape shape = ShapeOf(spec, static_cast<Matrix>(m));
    layer.codes[m].resize(spec.num_experts * shape.CodeBytes());
    layer.scales[m].resize(spec.num_experts * shape.ScaleBytes(spec.recipe));
  }
  InParallel(spec.num_experts * kNumMatrices, [&](int32_t index) {
    const int32_t expert = index / kNumMatrices;
    const int m = index % kNumMatrices;
    const auto matrix = static_cast<Matrix>(m);
    const MatrixShape shape = ShapeOf(spec, matrix);
    const uint64_t matrix_seed = seed * 1'000'003 + index;
    FillMatrix(spec, matrix, matrix_seed, layer.codes[m].data() + expert * shape.CodeBytes(),
               layer.scales[m].data() + expert * shape.ScaleBytes(spec.recipe));
    if (spec.recipe == Recipe::kNvfp4) {
      const double ratio = 0.5 + static_cast<double>(matrix_seed % 7) * 0.25;
      layer.second_level[index] = static_cast<float>(ratio / (4.5 * std::sqrt(shape.in)));
    }
  });
  return layer;
}

std::string RoutingName(Routing routing) {
  switch (routing) {
    case Routing::kUniform:
      return "uniform";
    case Routing::kSkewed:
      return "skewed";
    case Routing::kOneExpert:
      return "one expert";
    case Routing::kMasked:
      return "masked";
    case Routing::kAllMasked:
      return "all masked";
  }
  return "?";
}

HostBatch MakeRandomBatch(const LayerSpec& spec, int32_t num_tokens, int32_t top_k, Routing routing,
                          uint64_t seed) {
  SplitMix random(seed ^ 0xb5297a4d3f84d5b5ull);
  HostBatch batch;
  batch.num_tokens = num_tokens;
  batch.top_k = top_k;
  const size_t routes = static_cast<size_t>(num_tokens) * top_k;
  batch.hidden.resize(static_cast<size_t>(num_tokens) * spec.hidden_size);
  InParallel(num_tokens, [&](int32_t t) {
    SplitMix row_random(seed * 65'537 + t);
    for (int64_t i = 0; i < spec.hidden_size; ++i) {
      // The sum of four uniforms is near enough to a normal variable; variance 1 by the factor.
      const uint64_t word = row_random();
      double sum = -2;
      for (int j = 0; j < 4; ++j) sum += static_cast<double>((word >> (16 * j)) & 0xffff) / 65536;
      batch.hidden[t * spec.hidden_size + i] =
          FloatToBf16(static_cast<float>(sum * std::sqrt(3.0)));
    }
  });
  batch.ids.resize(routes);
  batch.weights.resize(routes);
  batch.row_in_request.resize(num_tokens);
  std::vector<int32_t> scratch;
  for (int32_t t = 0; t < num_tokens; ++t) {
    const auto row = absl::MakeSpan(batch.ids).subspan(static_cast<size_t>(t) * top_k, top_k);
    const bool masked_row = routing == Routing::kMasked && t % 5 == 4;
    for (int32_t& id : row) id = masked_row ? -1 : RandomExpert(spec, routing, random);
    if (routing == Routing::kUniform && top_k <= spec.num_experts) {
      DifferentExperts(spec.num_experts, row, scratch, random);
    }
    batch.row_in_request[t] = t;
  }
  const double size = 1 / std::sqrt(static_cast<double>(top_k));
  for (size_t r = 0; r < routes; ++r) {
    const double u = static_cast<double>(random() >> 11) * 0x1p-53;
    batch.weights[r] = batch.ids[r] < 0 ? std::numeric_limits<float>::quiet_NaN()
                                        : static_cast<float>((2.6 * u - 0.6) * size);
  }
  return batch;
}

HostBatch SelectRows(const HostBatch& batch, int64_t hidden_size, absl::Span<const int32_t> rows) {
  HostBatch selected;
  selected.num_tokens = static_cast<int32_t>(rows.size());
  selected.top_k = batch.top_k;
  const auto append = [](auto& to, const auto& from, int64_t row, int64_t width) {
    to.insert(to.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
  };
  for (const int32_t row : rows) {
    append(selected.hidden, batch.hidden, row, hidden_size);
    append(selected.ids, batch.ids, row, batch.top_k);
    append(selected.weights, batch.weights, row, batch.top_k);
    append(selected.row_in_request, batch.row_in_request, row, 1);
  }
  return selected;
}

std::vector<double> ReferenceRows(const HostLayer& layer, const HostBatch& batch) {
  const int64_t hidden_size = layer.spec.hidden_size;
  const std::vector<reference::ExpertView> experts = layer.Experts();
  std::vector<double> expected(static_cast<size_t>(batch.num_tokens) * hidden_size);
  constexpr int32_t kRowsAtOnce = 4;
  InParallel((batch.num_tokens + kRowsAtOnce - 1) / kRowsAtOnce, [&](int32_t part) {
    std::vector<int32_t> rows;
    for (int32_t row = part * kRowsAtOnce; row < batch.num_tokens && rows.size() < kRowsAtOnce;
         ++row) {
      rows.push_back(row);
    }
    const HostBatch mine = SelectRows(batch, hidden_size, rows);
    std::vector<double> hidden(mine.hidden.size());
    std::transform(mine.hidden.begin(), mine.hidden.end(), hidden.begin(), Bf16ToFloat);
    const std::vector<double> result =
        reference::Forward(layer.spec, experts, hidden, mine.ids, mine.weights, mine.top_k);
    std::copy(result.begin(), result.end(), expected.begin() + rows[0] * hidden_size);
  });
  return expected;
}

std::vector<int32_t> SpreadRows(int32_t num_tokens, int32_t count) {
  std::vector<int32_t> rows;
  if (num_tokens <= count) {
    rows.resize(num_tokens);
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }
  for (int32_t i = 0; i < count; ++i) {
    rows.push_back(static_cast<int32_t>(int64_t{i} * (num_tokens - 1) / (count - 1)));
  }
  return rows;
}

}  // namespace expertd::testing
