#include "tests/kernels/cuda/simt/rank_layer.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "config/check.h"
#include "kernels/cuda/moe_layer/instantiations/instantiations.h"
#include "kernels/cuda/moe_layer/launch_params.h"
#include "kernels/cuda/moe_layer/traits.h"
#include "kernels/layout/pack_host.h"
#include "tests/kernels/cuda/simt/simt.h"

namespace expertd::simt {
namespace {

namespace moe_layer = cuda::moe_layer;

layout::WeightFormat FormatOf(Recipe recipe) {
  return recipe == Recipe::kMxfp4 ? layout::WeightFormat::kMx : layout::WeightFormat::kNv;
}

moe_layer::Kernel KernelFor(layout::WeightFormat format, int variant) {
  return format == layout::WeightFormat::kMx ? moe_layer::MxKernel(variant)
                                             : moe_layer::NvKernel(variant);
}

// 256-byte aligned bytes.
struct Bytes {
  explicit Bytes(size_t count, int fill)
      : data(static_cast<uint8_t*>(std::aligned_alloc(256, (count + 511) / 256 * 256)),
             &std::free) {
    std::memset(data.get(), fill, count);
  }
  std::unique_ptr<uint8_t, decltype(&std::free)> data;
};

}  // namespace

struct RankLayer::Rank {
  Rank(const testing::HostLayer& layer, const Placement& placement, int rank);

  layout::PackedMatrix fc1, fc2;
  std::unique_ptr<Bytes> fc1_units, fc2_units;
  std::vector<float> fc1_factors, fc2_factors;
  std::vector<int32_t> first_slot, slots;
  uint32_t stop = 0;
  moe_layer::FaultRecord fault = {};
};

RankLayer::Rank::Rank(const testing::HostLayer& layer, const Placement& placement, int rank) {
  const LayerSpec& spec = layer.spec;
  const auto format = FormatOf(spec.recipe);
  const int hidden = static_cast<int>(spec.hidden_size);
  const int intermediate = static_cast<int>(spec.intermediate_size);
  const int num_slots = placement.slots_per_rank();
  fc1 = {format, 2 * intermediate, hidden};
  fc2 = {format, hidden, intermediate};
  fc1_units = std::make_unique<Bytes>(fc1.slot_bytes() * num_slots, 0);
  fc2_units = std::make_unique<Bytes>(fc2.slot_bytes() * num_slots, 0);
  fc1_factors.resize(fc1.scales_per_slot() * num_slots);
  fc2_factors.resize(fc2.scales_per_slot() * num_slots);
  for (int slot = 0; slot < num_slots; ++slot) {
    const int32_t expert = placement.ExpertAt(rank, slot);
    if (expert < 0) continue;
    for (int m = 0; m < kNumMatrices; ++m) {
      const auto matrix = static_cast<Matrix>(m);
      const MatrixShape shape = ShapeOf(spec, matrix);
      const reference::MatrixView view = layer.View(expert, matrix);
      const bool down = matrix == Matrix::kDown;
      const layout::PackedMatrix& packed = down ? fc2 : fc1;
      const auto rows = down                      ? layout::Rows::kAll
                        : matrix == Matrix::kGate ? layout::Rows::kGate
                                                  : layout::Rows::kUp;
      Bytes& units = down ? *fc2_units : *fc1_units;
      std::vector<float>& factors = down ? fc2_factors : fc1_factors;
      layout::PackMatrix(packed, rows,
                         {view.codes.data(), view.scales.data(), static_cast<int>(shape.out),
                          static_cast<int>(shape.in), static_cast<float>(view.second_level)},
                         units.data.get() + slot * packed.slot_bytes(),
                         factors.data() + slot * packed.scales_per_slot());
    }
  }
  first_slot.push_back(0);
  for (int32_t e = 0; e < placement.num_experts(); ++e) {
    for (const int32_t slot : placement.SlotsOf(e)) slots.push_back(slot);
    first_slot.push_back(static_cast<int32_t>(slots.size()));
  }
}

RankLayer::RankLayer(const testing::HostLayer& layer, const Placement& placement,
                     const Options& options)
    : spec_(layer.spec), placement_(placement), options_(options) {
  const int num_ranks = placement.num_ranks();
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks_.push_back(std::make_unique<Rank>(layer, placement, rank));
  }
  offsets_ = layout::PlanWorkspace({num_ranks, options.max_tokens, options.max_top_k,
                                    placement.slots_per_rank(), static_cast<int>(spec_.hidden_size),
                                    static_cast<int>(spec_.intermediate_size)});
  const size_t bytes = static_cast<size_t>(offsets_.bytes) * num_ranks;
  memory_ = std::make_unique<uint8_t[]>(bytes + 256);
  windows_ =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.get()) + 255) / 256 * 256);
  for (int rank = 0; rank < num_ranks; ++rank) {
    char* const window = windows_ + rank * offsets_.bytes;
    std::memset(window, 0, offsets_.bytes);
    std::memset(window + offsets_.tokens, 0xff, offsets_.partial_records - offsets_.tokens);
    std::memset(window + offsets_.routes, 0xff, offsets_.fc1_done - offsets_.routes);
    std::memset(window + offsets_.h, 0xff, offsets_.bytes - offsets_.h);
    // A record of ones is of step 0: sealed words are exclusive or.
    std::memset(window + offsets_.partial_records, 0xff,
                offsets_.routes - offsets_.partial_records);
  }
}

RankLayer::~RankLayer() = default;

const moe_layer::FaultRecord& RankLayer::fault(int rank) const { return ranks_[rank]->fault; }
void RankLayer::Stop(int rank) { ranks_[rank]->stop = 1; }

const uint32_t* RankLayer::routes(int rank, int list) const {
  const int64_t begin = list < 0 ? 0 : offsets_.max_routes + list * offsets_.own_routes;
  return reinterpret_cast<uint32_t*>(windows_ + rank * offsets_.bytes + offsets_.routes) + begin;
}

const uint16_t* RankLayer::slots(int rank, int list) const {
  const int64_t begin = list < 0 ? 0 : offsets_.max_routes + list * offsets_.own_routes;
  return reinterpret_cast<uint16_t*>(windows_ + rank * offsets_.bytes + offsets_.route_slots) +
         begin;
}

moe_layer::MoeLayerParams RankLayer::ParamsOf(int rank, const testing::HostBatch& batch,
                                              float* output) {
  Rank& mine = *ranks_[rank];
  moe_layer::MoeLayerParams params;
  params.num_tokens = batch.num_tokens;
  params.top_k = batch.top_k;
  params.hidden = static_cast<int32_t>(spec_.hidden_size);
  params.intermediate = static_cast<int32_t>(spec_.intermediate_size);
  params.num_experts = spec_.num_experts;
  params.num_slots = params.slots_per_rank = placement_.slots_per_rank();
  params.x = batch.hidden.data();
  params.ids = batch.ids.data();
  params.weights = batch.weights.data();
  params.row_in_request = batch.row_in_request.data();
  params.output = output;
  params.output_f32 = 1;
  params.first_slot = mine.first_slot.data();
  params.slots = mine.slots.data();
  params.fc1_units = mine.fc1_units->data.get();
  params.fc2_units = mine.fc2_units->data.get();
  params.fc1_factors = mine.fc1_factors.data();
  params.fc2_factors = mine.fc2_factors.data();
  params.swiglu_limit = spec_.swiglu_limit;
  params.peers = {windows_, offsets_.bytes, rank, placement_.num_ranks()};
  params.partials_bf16 = options_.partials_bf16;
  params.workspace = offsets_;
  params.stop = &mine.stop;
  params.fault = &mine.fault;
  params.timeout_ns = options_.timeout_ns;
  params.own_sort_routes = options_.own_sort_routes;
  params.step = step_;
  if (rank == options_.stalled_rank && step_ >= options_.first_stalled_step) {
    params.stall = options_.stall;
  }
  return params;
}

std::vector<std::vector<std::vector<float>>> RankLayer::Run(const std::vector<Batches>& steps) {
  const int num_ranks = placement_.num_ranks();
  const auto format = FormatOf(spec_.recipe);
  std::vector<std::vector<std::vector<float>>> outputs(steps.size());
  std::vector<std::vector<Launch>> streams(num_ranks);
  for (size_t s = 0; s < steps.size(); ++s) {
    ++step_;
    outputs[s].resize(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const testing::HostBatch& batch = steps[s][rank];
      outputs[s][rank].assign(static_cast<size_t>(batch.num_tokens) * spec_.hidden_size,
                              std::numeric_limits<float>::quiet_NaN());
      moe_layer::MoeLayerParams params = ParamsOf(rank, batch, outputs[s][rank].data());
      auto config =
          cuda::ChooseKernelConfig({format, spec_.hidden_size, spec_.intermediate_size,
                                    spec_.num_experts, placement_.slots_per_rank(), num_ranks},
                                   batch.num_tokens, batch.top_k, options_.num_ctas);
      EXPERTD_CHECK(config.ok());
      if (options_.far_lists) config->near_routes = 0;
      params = moe_layer::CompleteParams(params, format, *config);
      const auto kernel = KernelFor(format, moe_layer::VariantFor(config->token_tile));
      streams[rank].push_back({[kernel, params] { kernel(params); }, config->num_ctas,
                               moe_layer::kThreads, static_cast<size_t>(config->shared_bytes)});
    }
  }
  error_ = simt::Run(streams, {.seed = options_.seed});
  return outputs;
}

}  // namespace expertd::simt
