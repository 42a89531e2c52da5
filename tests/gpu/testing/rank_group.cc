#include "tests/gpu/testing/rank_group.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "config/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/moe_layer/launch.h"

namespace expertd::testing {
namespace {

using cuda::moe_layer::FaultRecord;
using cuda::moe_layer::MoeLayerParams;

constexpr absl::Duration kTimeout = absl::Seconds(5);    // of the kernel's waits, undisturbed
constexpr absl::Duration kHopeless = absl::Seconds(60);  // a kernel that ran so long never ends

std::vector<int32_t> ExpertsOf(const Placement& placement, int rank) {
  std::vector<int32_t> experts(placement.slots_per_rank());
  for (int32_t slot = 0; slot < placement.slots_per_rank(); ++slot) {
    experts[slot] = placement.ExpertAt(rank, slot);
  }
  return experts;
}

layout::WorkspaceShape ShapeOf(const LayerSpec& spec, const Placement& placement,
                               const RankGroup::Options& options) {
  return {.num_ranks = placement.num_ranks(),
          .max_tokens_per_rank = options.max_tokens,
          .max_top_k = options.max_top_k,
          .num_slots = placement.slots_per_rank(),
          .hidden = static_cast<int>(spec.hidden_size),
          .intermediate = static_cast<int>(spec.intermediate_size)};
}

// An array of every step's batches of one rank, one step behind the other.
template <typename T>
std::vector<T> Join(absl::Span<const RankBatches> steps, int rank,
                    std::vector<T> HostBatch::*member) {
  std::vector<T> joined;
  for (const RankBatches& step : steps) {
    const std::vector<T>& part = step[rank].*member;
    joined.insert(joined.end(), part.begin(), part.end());
  }
  return joined;
}

}  // namespace

RankBatches SplitRows(const HostBatch& batch, int64_t hidden_size,
                      absl::Span<const int32_t> tokens) {
  RankBatches parts;
  int32_t begin = 0;
  for (const int32_t count : tokens) {
    std::vector<int32_t> rows(count);
    std::iota(rows.begin(), rows.end(), begin);
    parts.push_back(SelectRows(batch, hidden_size, rows));
    begin += count;
  }
  return parts;
}

struct RankGroup::Arrays {
  Arrays(absl::Span<const RankBatches> steps, int rank, int64_t hidden_size, DType output_dtype)
      : hidden(Join(steps, rank, &HostBatch::hidden)),
        ids(Join(steps, rank, &HostBatch::ids)),
        weights(Join(steps, rank, &HostBatch::weights)),
        row_in_request(Join(steps, rank, &HostBatch::row_in_request)),
        output(row_in_request.size() * hidden_size * DTypeBytes(output_dtype)) {
    for (const RankBatches& step : steps) {
      first_row.push_back(first_row.back() + step[rank].num_tokens);
      first_route.push_back(first_route.back() + step[rank].num_tokens * step[rank].top_k);
    }
  }

  DeviceArray<uint16_t> hidden;
  DeviceArray<int32_t> ids;
  DeviceArray<float> weights;
  DeviceArray<int32_t> row_in_request;
  DeviceArray<uint8_t> output;           // starts as NaN
  std::vector<int64_t> first_row = {0};  // by step
  std::vector<int64_t> first_route = {0};
};

RankGroup::Rank::Rank(const HostLayer& layer, const Placement& placement, int rank)
    : packed(layer, ExpertsOf(placement, rank)), placement(placement) {
  auto block = cuda::MemoryBlock::Allocate(cuda::MemoryKind::kPinned, sizeof(Control));
  if (!block.ok()) {
    ADD_FAILURE() << block.status();
    return;
  }
  control = *std::move(block);
  std::memset(control.data(), 0, sizeof(Control));
}

RankGroup::RankGroup(const HostLayer& layer, const Placement& placement, const Options& options)
    : spec_(layer.spec),
      options_(options),
      slots_per_rank_(placement.slots_per_rank()),
      shape_(ShapeOf(layer.spec, placement, options)),
      ranks_(placement.num_ranks()) {}

RankGroup::~RankGroup() {
  if (site_ == nullptr) return;
  Each([this](int rank, cudaStream_t) {
    ranks_[rank].reset();
    return absl::OkStatus();
  });
}

absl::StatusOr<std::unique_ptr<RankGroup>> RankGroup::Make(RankMode mode, const HostLayer& layer,
                                                           const Placement& placement,
                                                           const Options& options) {
  std::unique_ptr<RankGroup> group(new RankGroup(layer, placement, options));
  auto site =
      RankSite::Open(mode, placement.num_ranks(), layout::PlanWorkspace(group->shape_).bytes);
  if (!site.ok()) return site.status();
  group->site_ = *std::move(site);
  const absl::Status status = group->site_->ForEach([&](int rank, cudaStream_t) -> absl::Status {
    group->ranks_[rank] = std::make_unique<Rank>(layer, placement, rank);
    return EXPERTD_CUDA_STATUS(cuda::moe_layer::PrepareDevice());
  });
  if (!status.ok()) return status;
  group->ClearWorkspaces();
  return group;
}

RankGroup::Control& RankGroup::control(int rank) const {
  return *ranks_[rank]->control.as<Control>();
}

void RankGroup::Each(const RankSite::Work& work) {
  const absl::Status status = site_->ForEach(work);
  ASSERT_TRUE(status.ok()) << status;
}

// On new workspaces, and when every rank's kernel has ended with a record somewhere.
void RankGroup::ClearWorkspaces() {
  Each([this](int rank, cudaStream_t stream) -> absl::Status {
    std::memset(&control(rank), 0, sizeof(Control));
    char* const workspace = site_->peers(rank).at<char>(rank, 0);
    EXPERTD_CUDA_RETURN_IF_ERROR(
        cudaMemsetAsync(workspace, 0, static_cast<size_t>(site_->workspace_bytes()), stream));
    return EXPERTD_CUDA_STATUS(cudaStreamSynchronize(stream));
  });
  step_ = 0;
}

// Regions that hold data; flags and counters stay. A record of ones is of step 0: sealed words are
// exclusive or.
void RankGroup::PoisonData(int rank, cudaStream_t stream) {
  const layout::WorkspaceOffsets offsets = layout::PlanWorkspace(shape_);
  const auto at = [&](int64_t offset) { return site_->peers(rank).at<char>(rank, offset); };
  const std::pair<int64_t, int64_t> regions[] = {{offsets.route_records, offsets.token_flags},
                                                 {offsets.tokens, offsets.routes},
                                                 {offsets.h, offsets.bytes}};
  for (const auto& [begin, end] : regions) {
    EXPECT_EQ(cudaMemsetAsync(at(begin), 0xff, static_cast<size_t>(end - begin), stream),
              cudaSuccess);
  }
}

// Ends when the copies have arrived: the ranks' streams do not wait for those that did them.
void RankGroup::Upload(absl::Span<const RankBatches> steps, DType output) {
  Each([&](int rank, cudaStream_t) -> absl::Status {
    ranks_[rank]->arrays = std::make_unique<Arrays>(steps, rank, spec_.hidden_size, output);
    return EXPERTD_CUDA_STATUS(cudaDeviceSynchronize());
  });
}

MoeLayerParams RankGroup::Params(int rank) const {
  const Rank& mine = *ranks_[rank];
  MoeLayerParams params;
  params.hidden = static_cast<int32_t>(spec_.hidden_size);
  params.intermediate = static_cast<int32_t>(spec_.intermediate_size);
  params.num_experts = spec_.num_experts;
  params.num_slots = params.slots_per_rank = slots_per_rank_;
  params.first_slot = mine.placement.view().first_slot;
  params.slots = mine.placement.view().slots;
  params.fc1_units = mine.packed.view().fc1_units;
  params.fc2_units = mine.packed.view().fc2_units;
  params.fc1_factors = mine.packed.view().fc1_factors;
  params.fc2_factors = mine.packed.view().fc2_factors;
  params.swiglu_limit = spec_.swiglu_limit;
  params.peers = site_->peers(rank);
  params.partials_bf16 = options_.partials_bf16;
  params.workspace = layout::PlanWorkspace(shape_);
  params.own_sort_routes = options_.own_sort_routes;
  auto* control = static_cast<Control*>(mine.control.device_data());
  params.stop = &control->stop;
  params.fault = &control->fault;
  return params;
}

absl::Status RankGroup::LaunchStep(absl::Span<const RankBatches> steps, size_t index, DType output,
                                   int rank, const Disturbance& disturbance, cudaStream_t stream) {
  const HostBatch& batch = steps[index][rank];
  const Arrays& arrays = *ranks_[rank]->arrays;
  const int64_t row = arrays.first_row[index];
  MoeLayerParams params = Params(rank);
  params.num_tokens = batch.num_tokens;
  params.top_k = batch.top_k;
  params.x = arrays.hidden.data() + row * spec_.hidden_size;
  params.ids = arrays.ids.data() + arrays.first_route[index];
  params.weights = arrays.weights.data() + arrays.first_route[index];
  params.row_in_request = arrays.row_in_request.data() + row;
  params.output = arrays.output.data() + row * spec_.hidden_size * DTypeBytes(output);
  params.output_f32 = output == DType::kF32;
  params.step = step_ + static_cast<uint32_t>(index) + 1;
  params.timeout_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(disturbance.timeout));
  if (rank == disturbance.stalled_rank) params.stall = disturbance.stall;
  int32_t tokens = batch.num_tokens;
  if (!options_.config_of_own_tokens) {
    for (const HostBatch& other : steps[index]) tokens = std::max(tokens, other.num_tokens);
  }
  const cuda::LayerShape shape = {.format = cuda::FormatOf(spec_.recipe),
                                  .hidden = spec_.hidden_size,
                                  .intermediate = spec_.intermediate_size,
                                  .num_experts = spec_.num_experts,
                                  .num_slots = slots_per_rank_,
                                  .num_ranks = num_ranks()};
  const auto config = cuda::ChooseKernelConfig(shape, tokens, batch.top_k, site_->num_ctas());
  if (!config.ok()) return config.status();
  return EXPERTD_CUDA_STATUS(cuda::moe_layer::Launch(shape.format, *config, params, stream));
}

std::vector<RankOutputs> RankGroup::Download(absl::Span<const RankBatches> steps, DType output) {
  std::vector<RankOutputs> outputs(steps.size(), RankOutputs(num_ranks()));
  Each([&](int rank, cudaStream_t) {
    const std::vector<uint8_t> all = ranks_[rank]->arrays->output.Download();
    const int64_t row_bytes = spec_.hidden_size * DTypeBytes(output);
    for (size_t i = 0; i < steps.size(); ++i) {
      const int64_t begin = ranks_[rank]->arrays->first_row[i] * row_bytes;
      const int64_t end = ranks_[rank]->arrays->first_row[i + 1] * row_bytes;
      outputs[i][rank].assign(all.begin() + begin, all.begin() + end);
    }
    return absl::OkStatus();
  });
  return outputs;
}

void RankGroup::ExpectNoFault() {
  bool faulty = false;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const FaultRecord& fault = control(rank).fault;
    faulty |= fault.code != cuda::moe_layer::kNoFault;
    EXPECT_EQ(fault.code, cuda::moe_layer::kNoFault)
        << "rank " << rank << ", step " << fault.step << ": waited for rank " << fault.peer
        << ", CTA " << fault.cta << ", tile " << fault.tile << ", found " << fault.found
        << ", expected " << fault.expected;
  }
  if (faulty) ClearWorkspaces();
}

RankOutputs RankGroup::Run(const RankBatches& batches, DType output) {
  Each([this](int rank, cudaStream_t stream) -> absl::Status {
    PoisonData(rank, stream);
    return EXPERTD_CUDA_STATUS(cudaStreamSynchronize(stream));
  });
  return RunSteps({batches}, output)[0];
}

std::vector<RankOutputs> RankGroup::RunSteps(absl::Span<const RankBatches> steps, DType output) {
  Upload(steps, output);
  const Disturbance none = {.timeout = kTimeout};
  const absl::Status launched = site_->ForEachStep(
      static_cast<int>(steps.size()), [&](int rank, int index, cudaStream_t stream) {
        return LaunchStep(steps, index, output, rank, none, stream);
      });
  EXPECT_TRUE(launched.ok()) << launched;
  const absl::Status status = site_->Synchronise();
  EXPECT_TRUE(status.ok()) << status;
  step_ += static_cast<uint32_t>(steps.size());
  ExpectNoFault();
  return Download(steps, output);
}

RankGroup::Disturbed RankGroup::RunDisturbed(const RankBatches& batches,
                                             const Disturbance& disturbance) {
  Upload({batches}, DType::kBf16);
  Disturbed result;
  result.step = step_ + 1;
  const absl::Time start = absl::Now();  // of the earliest wait, so that no wait seems too short
  Each([&](int rank, cudaStream_t stream) {
    return LaunchStep({batches}, 0, DType::kBf16, rank, disturbance, stream);
  });
  Watch(disturbance, start, &result);
  for (int rank = 0; rank < num_ranks(); ++rank) result.records.push_back(control(rank).fault);
  ClearWorkspaces();
  return result;
}

// Notes when each rank's kernel ends, and sets the stop words when it is time.
void RankGroup::Watch(const Disturbance& disturbance, absl::Time start, Disturbed* result) {
  std::vector<bool> running(num_ranks(), true);
  result->ended.assign(num_ranks(), absl::InfiniteDuration());
  bool stopped = disturbance.stopped_ranks.empty();
  while (std::find(running.begin(), running.end(), true) != running.end()) {
    const absl::Duration now = absl::Now() - start;
    EXPERTD_CHECK(now < kHopeless);  // its memory cannot be freed
    if (!stopped && now >= disturbance.stop_after) {
      for (const int rank : disturbance.stopped_ranks) {
        std::atomic_ref(control(rank).stop).store(1);
      }
      stopped = true;
    }
    for (int rank = 0; rank < num_ranks(); ++rank) {
      if (!running[rank]) continue;
      const cudaError_t error = cudaStreamQuery(site_->stream(rank));
      if (error == cudaErrorNotReady) continue;
      EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
      running[rank] = false;
      result->ended[rank] = absl::Now() - start;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace expertd::testing
