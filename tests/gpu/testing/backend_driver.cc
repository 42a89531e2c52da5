#include "tests/gpu/testing/backend_driver.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/formats.h"
#include "kernels/reference/reference.h"

namespace expertd::testing {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status LoadMatrix(const HostLayer& layer, int32_t expert, const MatrixId& id,
                        WeightSink& sink) {
  absl::StatusOr<MatrixBuffers> buffers = sink.Reserve(id, absl::Now() + kPatience);
  if (!buffers.ok()) return buffers.status();
  const reference::MatrixView view = layer.View(expert, id.matrix);
  std::copy(view.codes.begin(), view.codes.end(), buffers->codes.begin());
  std::copy(view.scales.begin(), view.scales.end(), buffers->scales.begin());
  return sink.Commit(id, static_cast<float>(view.second_level));
}

}  // namespace

absl::Status LoadLayers(absl::Span<const HostLayer> layers, const Placement& placement,
                        WeightSink& sink) {
  for (const HostLayer& layer : layers) {
    for (int32_t at = 0; at < placement.num_ranks() * placement.slots_per_rank(); ++at) {
      const int32_t rank = at / placement.slots_per_rank();
      const int32_t slot = at % placement.slots_per_rank();
      const int32_t expert = placement.ExpertAt(rank, slot);
      if (expert < 0) continue;
      for (int m = 0; m < kNumMatrices; ++m) {
        const MatrixId id = {rank, layer.spec.layer, slot, static_cast<Matrix>(m)};
        if (absl::Status status = LoadMatrix(layer, expert, id, sink); !status.ok()) return status;
      }
    }
  }
  return sink.Finish();
}

MoeStep FillStep(const StepMemory& memory, const LayerSpec& spec, const HostBatch& batch,
                 DType input, DType output, const Spread& spread) {
  MoeStep step;
  step.layer = spec.layer;
  step.top_k = batch.top_k;
  step.input_dtype = input;
  step.output_dtype = output;
  step.ranks = memory.ranks;
  const auto ranks = static_cast<int32_t>(step.ranks.size());
  int64_t first = 0;
  for (int32_t r = 0; r < ranks; ++r) {
    RankBatch& rank = step.ranks[r];
    rank.num_tokens = spread.empty() ? (batch.num_tokens + ranks - 1 - r) / ranks
                                     : spread[static_cast<size_t>(r)];
    const int64_t count = rank.num_tokens;
    const auto copy = [&](const auto& from, int64_t width, auto* to) {
      std::copy_n(from.begin() + first * width, count * width, to);
    };
    if (input == DType::kBf16) {
      copy(batch.hidden, spec.hidden_size, static_cast<uint16_t*>(rank.hidden));
    } else {
      const auto begin = batch.hidden.begin() + first * spec.hidden_size;
      std::transform(begin, begin + count * spec.hidden_size, static_cast<float*>(rank.hidden),
                     Bf16ToFloat);
    }
    copy(batch.ids, batch.top_k, rank.ids);
    copy(batch.weights, batch.top_k, rank.weights);
    copy(batch.row_in_request, 1, rank.row_in_request);
    std::memset(rank.output, 0xff, count * spec.hidden_size * DTypeBytes(output));
    first += count;
  }
  return step;
}

std::vector<uint8_t> OutputBytes(const MoeStep& step, int64_t hidden_size) {
  std::vector<uint8_t> bytes;
  for (const RankBatch& rank : step.ranks) {
    const auto* begin = static_cast<const uint8_t*>(rank.output);
    bytes.insert(bytes.end(), begin,
                 begin + rank.num_tokens * hidden_size * DTypeBytes(step.output_dtype));
  }
  return bytes;
}

absl::StatusOr<StepOutput> RunStep(Backend& backend, const LayerSpec& spec, const HostBatch& batch,
                                   DType input, DType output, const Spread& spread) {
  absl::StatusOr<StepMemory*> memory = backend.AcquireStep(absl::Now() + kPatience);
  if (!memory.ok()) return memory.status();
  const MoeStep step = FillStep(**memory, spec, batch, input, output, spread);
  std::promise<StepResult> promise;
  absl::Status status =
      backend.Submit(step, [&](StepResult result) { promise.set_value(std::move(result)); });
  StepOutput answer;
  if (status.ok()) {
    StepResult result = promise.get_future().get();
    status = std::move(result.status);
    answer.timing = result.timing;
  }
  if (status.ok()) {
    answer.bytes = OutputBytes(step, spec.hidden_size);
    answer.values.resize(answer.bytes.size() / DTypeBytes(output));
    for (size_t i = 0; i < answer.values.size(); ++i) {
      answer.values[i] =
          output == DType::kF32
              ? reinterpret_cast<const float*>(answer.bytes.data())[i]
              : Bf16ToFloat(reinterpret_cast<const uint16_t*>(answer.bytes.data())[i]);
    }
  }
  backend.ReleaseStep(*memory);
  if (!status.ok()) return status;
  return answer;
}

absl::StatusOr<WorstAnswer> WorstOfEveryDtypeAndRouting(Backend& backend,
                                                        absl::Span<const HostLayer> layers) {
  WorstAnswer worst;
  for (const HostLayer& layer : layers) {
    for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kOneExpert,
                                  Routing::kMasked, Routing::kAllMasked}) {
      const HostBatch batch = MakeRandomBatch(layer.spec, 100, 4, routing, 3);
      const std::vector<double> expected = ReferenceRows(layer, batch);
      for (const DType input : {DType::kBf16, DType::kF32}) {
        for (const DType output : {DType::kBf16, DType::kF32}) {
          const auto answer = RunStep(backend, layer.spec, batch, input, output);
          if (!answer.ok()) return answer.status();
          const double error = reference::RelL2(answer->values, expected);
          if (error <= worst.error) continue;  // not so for NaN, which then stays
          worst = {error, RoutingName(routing) + ", " + std::string(RecipeName(layer.spec.recipe))};
          if (std::isnan(error)) return worst;
        }
      }
    }
  }
  return worst;
}

}  // namespace expertd::testing
