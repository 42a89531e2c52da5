#include "tests/kernels/cpu/cpu_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <random>

#include "kernels/formats.h"

namespace expertd::testing {

LayerSpec MakeSpec(Recipe recipe, int64_t hidden_size, int64_t intermediate_size,
                   int32_t num_experts) {
  LayerSpec spec;
  spec.layer = 3;
  spec.hidden_size = hidden_size;
  spec.intermediate_size = intermediate_size;
  spec.num_experts = num_experts;
  spec.top_k = 2;
  spec.recipe = recipe;
  spec.swiglu_limit = 1.5f;
  return spec;
}

RandomExperts::RandomExperts(const LayerSpec& spec, uint64_t seed) : spec_(spec) {
  std::mt19937_64 random(seed);
  matrices_.resize(static_cast<size_t>(spec.num_experts) * kNumMatrices);
  for (int32_t expert = 0; expert < spec.num_experts; ++expert) {
    for (int m = 0; m < kNumMatrices; ++m) {
      const MatrixShape shape = ShapeOf(spec, static_cast<Matrix>(m));
      Bytes& bytes = At(expert, static_cast<Matrix>(m));
      bytes.codes.resize(shape.CodeBytes());
      bytes.scales.resize(shape.ScaleBytes(spec.recipe));
      for (uint8_t& code : bytes.codes) code = static_cast<uint8_t>(random());
      const int64_t block_bytes = ScaleGroup(spec.recipe) / 2;
      for (size_t block = 0; block < bytes.scales.size(); ++block) {
        // MXFP4 2^-7..2^-4, NVFP4 about 2^-7..2^-1 with any mantissa, subnormals among them.
        bytes.scales[block] = static_cast<uint8_t>(
            spec.recipe == Recipe::kMxfp4 ? 120 + random() % 4 : 1 + random() % 48);
        if (random() % 16 != 0) continue;
        bytes.scales[block] = 0;
        for (int64_t i = 0; i < block_bytes; ++i) {
          bytes.codes[block * block_bytes + i] &= 0x88;  // +0 and -0
        }
      }
      if (spec.recipe == Recipe::kNvfp4) {
        bytes.second_level = 0.3f + 0.001f * static_cast<float>(random() % 1000);
      }
    }
  }
}

std::vector<reference::ExpertView> RandomExperts::Views() const {
  std::vector<reference::ExpertView> views(spec_.num_experts);
  for (int32_t expert = 0; expert < spec_.num_experts; ++expert) {
    for (int m = 0; m < kNumMatrices; ++m) {
      const Bytes& bytes = At(expert, static_cast<Matrix>(m));
      views[expert].matrices[m] = {bytes.codes, bytes.scales, bytes.second_level};
    }
  }
  return views;
}

absl::Status RandomExperts::LoadInto(WeightSink& sink, const Placement& placement,
                                     int32_t first_rank, int32_t num_ranks) const {
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (int32_t slot = 0; slot < placement.slots_per_rank(); ++slot) {
      const int32_t expert = placement.ExpertAt(first_rank + rank, slot);
      if (expert < 0) continue;
      for (int m = 0; m < kNumMatrices; ++m) {
        const MatrixId id{rank, spec_.layer, slot, static_cast<Matrix>(m)};
        const Bytes& bytes = At(expert, id.matrix);
        auto buffers = sink.Reserve(id, absl::InfiniteFuture());
        if (!buffers.ok()) return buffers.status();
        std::copy(bytes.codes.begin(), bytes.codes.end(), buffers->codes.begin());
        std::copy(bytes.scales.begin(), bytes.scales.end(), buffers->scales.begin());
        if (absl::Status status = sink.Commit(id, bytes.second_level); !status.ok()) return status;
      }
    }
  }
  return sink.Finish();
}

Rows RandomRows(const LayerSpec& spec, int32_t num_tokens, int32_t top_k, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Rows rows;
  rows.num_tokens = num_tokens;
  rows.top_k = top_k;
  for (int64_t i = 0; i < num_tokens * spec.hidden_size; ++i) {
    rows.hidden.push_back(Bf16ToFloat(FloatToBf16(normal(random))));
  }
  for (int32_t i = 0; i < num_tokens * top_k; ++i) {
    rows.ids.push_back(static_cast<int32_t>(random() % spec.num_experts));
    rows.weights.push_back(0.1f + 0.01f * static_cast<float>(random() % 100));
  }
  return rows;
}

Rows Slice(const LayerSpec& spec, const Rows& rows, int32_t begin, int32_t end) {
  const auto part = [&](const auto& values, int64_t width) {
    return std::decay_t<decltype(values)>(values.begin() + begin * width,
                                          values.begin() + end * width);
  };
  return {end - begin, rows.top_k, part(rows.hidden, spec.hidden_size), part(rows.ids, rows.top_k),
          part(rows.weights, rows.top_k)};
}

std::vector<double> Expected(const RandomExperts& experts, const Rows& rows) {
  const std::vector<reference::ExpertView> views = experts.Views();
  const std::vector<double> hidden(rows.hidden.begin(), rows.hidden.end());
  return reference::Forward(experts.spec(), views, hidden, rows.ids, rows.weights, rows.top_k);
}

std::unique_ptr<Backend> MakeLoaded(const RandomExperts& experts, cpu::CpuBackendOptions options) {
  options.common.layers = {experts.spec()};
  auto backend = cpu::MakeCpuBackend(options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  if (!backend.ok()) return nullptr;
  const absl::Status status = experts.LoadInto((*backend)->sink(), *options.common.placement,
                                               options.first_rank, (*backend)->info().num_ranks);
  EXPECT_TRUE(status.ok()) << status;
  return *std::move(backend);
}

std::unique_ptr<Backend> MakeLoaded(const RandomExperts& experts, const Placement& placement,
                                    int32_t max_tokens, int32_t num_threads) {
  cpu::CpuBackendOptions options;
  options.common.placement = std::make_shared<const Placement>(placement);
  options.common.max_tokens_per_rank = max_tokens;
  options.common.num_threads = num_threads;
  return MakeLoaded(experts, std::move(options));
}

StepResult RunAndWait(Backend& backend, const MoeStep& step) {
  std::promise<StepResult> done;
  const absl::Status status =
      backend.Submit(step, [&](StepResult result) { done.set_value(std::move(result)); });
  if (!status.ok()) return {status, {}};
  return done.get_future().get();
}

namespace {

void FillRow(const LayerSpec& spec, const Rows& rows, int32_t token, DType dtype,
             RankBatch& batch) {
  const int64_t hidden_size = spec.hidden_size;
  const int32_t row = batch.num_tokens++;
  const float* from = rows.hidden.data() + token * hidden_size;
  for (int64_t i = 0; i < hidden_size; ++i) {
    if (dtype == DType::kF32) {
      static_cast<float*>(batch.hidden)[row * hidden_size + i] = from[i];
    } else {
      static_cast<uint16_t*>(batch.hidden)[row * hidden_size + i] = FloatToBf16(from[i]);
    }
  }
  std::copy_n(rows.ids.begin() + token * rows.top_k, rows.top_k, batch.ids + row * rows.top_k);
  std::copy_n(rows.weights.begin() + token * rows.top_k, rows.top_k,
              batch.weights + row * rows.top_k);
  batch.row_in_request[row] = token;
}

}  // namespace

absl::StatusOr<std::vector<float>> RunStep(Backend& backend, const LayerSpec& spec,
                                           const Rows& rows, const StepOptions& options) {
  auto memory = backend.AcquireStep(absl::Now() + absl::Seconds(10));
  if (!memory.ok()) return memory.status();
  MoeStep step;
  step.step = options.step;
  step.layer = spec.layer;
  step.top_k = rows.top_k;
  step.input_dtype = options.input_dtype;
  step.output_dtype = options.output_dtype;
  step.ranks = (*memory)->ranks;
  const auto num_ranks = static_cast<int32_t>(step.ranks.size());
  const auto home = [&](int32_t token) { return options.all_on_rank_zero ? 0 : token % num_ranks; };
  for (int32_t token = 0; token < rows.num_tokens; ++token) {
    FillRow(spec, rows, token, options.input_dtype, step.ranks[home(token)]);
  }
  const int64_t out_bytes = spec.hidden_size * DTypeBytes(options.output_dtype);
  for (RankBatch& batch : step.ranks) {
    std::memset(batch.output, 0xff, batch.num_tokens * out_bytes);  // NaN: every element is written
  }
  const StepResult result = RunAndWait(backend, step);
  std::vector<float> output(rows.num_tokens * spec.hidden_size);
  std::vector<int32_t> next(num_ranks);
  for (int32_t token = 0; token < rows.num_tokens && result.status.ok(); ++token) {
    const int32_t rank = home(token);
    const int64_t from = next[rank]++ * spec.hidden_size;
    for (int64_t i = 0; i < spec.hidden_size; ++i) {
      output[token * spec.hidden_size + i] =
          options.output_dtype == DType::kF32
              ? static_cast<const float*>(step.ranks[rank].output)[from + i]
              : Bf16ToFloat(static_cast<const uint16_t*>(step.ranks[rank].output)[from + i]);
    }
  }
  backend.ReleaseStep(*memory);
  if (!result.status.ok()) return result.status;
  return output;
}

bool SameBits(absl::Span<const float> a, absl::Span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace expertd::testing
