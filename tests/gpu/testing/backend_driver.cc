#include "tests/gpu/testing/backend_driver.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/formats.h"

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
    for (int32_t slot = 0; slot < placement.slots_per_rank(); ++slot) {
      const int32_t expert = placement.ExpertAt(0, slot);
      if (expert < 0) continue;
      for (int m = 0; m < kNumMatrices; ++m) {
        const MatrixId id = {0, layer.spec.layer, slot, static_cast<Matrix>(m)};
        if (absl::Status status = LoadMatrix(layer, expert, id, sink); !status.ok()) return status;
      }
    }
  }
  return sink.Finish();
}

MoeStep FillStep(const StepMemory& memory, const LayerSpec& spec, const HostBatch& batch,
                 DType input, DType output) {
  MoeStep step;
  step.layer = spec.layer;
  step.top_k = batch.top_k;
  step.input_dtype = input;
  step.output_dtype = output;
  step.ranks = memory.ranks;
  RankBatch& rank = step.ranks[0];
  rank.num_tokens = batch.num_tokens;
  if (input == DType::kBf16) {
    std::copy(batch.hidden.begin(), batch.hidden.end(), static_cast<uint16_t*>(rank.hidden));
  } else {
    std::transform(batch.hidden.begin(), batch.hidden.end(), static_cast<float*>(rank.hidden),
                   Bf16ToFloat);
  }
  std::copy(batch.ids.begin(), batch.ids.end(), rank.ids);
  std::copy(batch.weights.begin(), batch.weights.end(), rank.weights);
  std::copy(batch.row_in_request.begin(), batch.row_in_request.end(), rank.row_in_request);
  std::memset(rank.output, 0xff, batch.num_tokens * spec.hidden_size * DTypeBytes(output));
  return step;
}

absl::StatusOr<StepOutput> RunStep(Backend& backend, const LayerSpec& spec, const HostBatch& batch,
                                   DType input, DType output) {
  absl::StatusOr<StepMemory*> memory = backend.AcquireStep(absl::Now() + kPatience);
  if (!memory.ok()) return memory.status();
  const MoeStep step = FillStep(**memory, spec, batch, input, output);
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
    const size_t elements = batch.num_tokens * spec.hidden_size;
    const auto* bytes = static_cast<const uint8_t*>(step.ranks[0].output);
    answer.bytes.assign(bytes, bytes + elements * DTypeBytes(output));
    answer.values.resize(elements);
    for (size_t i = 0; i < elements; ++i) {
      answer.values[i] = output == DType::kF32
                             ? static_cast<const float*>(step.ranks[0].output)[i]
                             : Bf16ToFloat(static_cast<const uint16_t*>(step.ranks[0].output)[i]);
    }
  }
  backend.ReleaseStep(*memory);
  if (!status.ok()) return status;
  return answer;
}

}  // namespace expertd::testing
