#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "absl/time/time.h"
#include "kernels/cuda/moe_layer/launch.h"
#include "kernels/cuda/ptx/memory.cuh"
#include "kernels/formats.h"
#include "tests/bench/moe_layer/layer_group.h"

namespace expertd::bench {
namespace {

constexpr Geometry kGeometries[] = {{"pro_fold", 7168, 3072, 48, 6},
                                    {"v3_fold", 7168, 2048, 32, 8},
                                    {"gptoss", 2880, 2880, 128, 4},
                                    {"qwen3", 4096, 1536, 128, 8},
                                    {"flash_fold", 4096, 2048, 32, 6}};
constexpr float kSwigluLimit = 10;
constexpr uint64_t kTimeoutNs = 2'000'000'000;
constexpr int64_t kMeetBytes = 4096;  // behind the workspace: a word a rank

struct Control {
  uint32_t stop;
  uint32_t unused[31];
  cuda::moe_layer::FaultRecord fault;
};

// Tells every rank that this one is here and waits for them: launches behind it start together.
__global__ void meet(cuda::PeerMap peers, int64_t offset, uint32_t meeting) {
  for (int peer = 0; peer < peers.num_ranks; ++peer) {
    cuda::ptx::st_release_sys(peers.at<uint32_t>(peer, offset) + peers.rank, meeting);
  }
  const uint64_t since = cuda::ptx::globaltimer_ns();
  for (int peer = 0; peer < peers.num_ranks; ++peer) {
    const uint32_t* word = peers.at<uint32_t>(peers.rank, offset) + peer;
    while (cuda::ptx::ld_relaxed_sys(word) < meeting &&
           cuda::ptx::globaltimer_ns() - since < kTimeoutNs) {
    }
  }
}

std::vector<int32_t> RandomIds(int tokens, int experts, int top_k, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids, all(experts);
  std::iota(all.begin(), all.end(), 0);
  for (int t = 0; t < tokens; ++t) {
    for (int k = 0; k < top_k; ++k) {
      std::swap(all[k], all[k + random() % (experts - k)]);
      ids.push_back(all[k]);
    }
  }
  return ids;
}

}  // namespace

const Geometry* FindGeometry(const std::string& name) {
  const auto found = std::find_if(std::begin(kGeometries), std::end(kGeometries),
                                  [&](const Geometry& g) { return name == g.name; });
  return found == std::end(kGeometries) ? nullptr : found;
}

LayerGroup::LayerGroup(const GroupOptions& options) : options_(options), ranks_(options.num_ranks) {
  const Geometry& g = options_.geometry;
  spec_ = {.hidden_size = g.hidden,
           .intermediate_size = g.intermediate,
           .num_experts = num_experts(),
           .top_k = g.top_k,
           .recipe = options_.recipe,
           .swiglu_limit = kSwigluLimit};
  const int64_t workspace = options_.exchange == Exchange::kLsa
                                ? layout::PlanWorkspace(WorkspaceShape(options_.max_tokens)).bytes
                                : 0;
  auto site = testing::RankSite::Open(
      options_.num_ranks == 1 ? testing::RankMode::kSameDevice : testing::RankMode::kDeviceEach,
      options_.num_ranks, workspace + kMeetBytes);
  BENCH_CHECK(site.status());
  site_ = *std::move(site);
  BENCH_CHECK(site_->ForEach([this](int rank, cudaStream_t) {
    MakeRank(rank);
    return absl::OkStatus();
  }));
}

LayerGroup::~LayerGroup() {
  BENCH_CHECK(site_->ForEach([this](int rank, cudaStream_t) {
    ranks_[rank].reset();
    return absl::OkStatus();
  }));
}

void LayerGroup::MakeRank(int rank) {
  ranks_[rank] = std::make_unique<Rank>();
  Rank& mine = *ranks_[rank];
  mine.gpu = MakeGpu(mine.arena);
  BENCH_CHECK(cuda::moe_layer::PrepareDevice());
  MakeWeights(mine, rank);
  std::vector<int32_t> count_up(num_experts() + 1);
  std::iota(count_up.begin(), count_up.end(), 0);
  mine.count_up = mine.arena.Device(count_up);
  cuda::MemoryBlock& control = mine.arena.Pinned<Control>(1);
  std::memset(control.data(), 0, sizeof(Control));
  mine.fault = &control.as<Control>()->fault;
  mine.device_control = control.device_data();
  const int64_t elements = int64_t{options_.max_tokens} * options_.geometry.hidden;
  std::mt19937 random(1 + rank);
  std::normal_distribution<float> normal;
  mine.host_x.resize(elements);
  for (uint16_t& value : mine.host_x) value = FloatToBf16(normal(random));
  mine.x = mine.arena.Device(mine.host_x);
  mine.output = mine.arena.Device<uint16_t>(elements);
  if (options_.exchange == Exchange::kHost) MakeExchange(rank);
  BENCH_CHECK(cudaDeviceSynchronize());
}

void LayerGroup::MakeWeights(Rank& mine, int rank) {
  const int slots = options_.geometry.experts;
  mine.packed = cuda::SetPackedLayer(
      spec_, slots,
      mine.arena.Device<uint8_t>(static_cast<int64_t>(cuda::PackedLayerBytes(spec_, slots))));
  Arena arena;
  const MatrixShape largest = ShapeOf(spec_, Matrix::kGate);
  uint8_t* codes = arena.Device<uint8_t>(largest.CodeBytes());
  uint8_t* scales = arena.Device<uint8_t>(largest.ScaleBytes(spec_.recipe));
  void* scratch = arena.Device<uint8_t>(static_cast<int64_t>(cuda::PackScratchBytes(spec_)));
  const bool mx = spec_.recipe == Recipe::kMxfp4;
  for (int slot = 0; slot < slots; ++slot) {
    for (int m = 0; m < kNumMatrices; ++m) {
      const MatrixShape shape = ShapeOf(spec_, static_cast<Matrix>(m));
      const uint32_t seed = (rank * slots + slot) * 16 + m * 2 + 1;
      FillRandom(reinterpret_cast<uint32_t*>(codes), shape.CodeBytes() / 4, seed, ~0u, 0, nullptr);
      // MXFP4: 2^-9 .. 2^-6; NVFP4: codes of 2^-2 .. 2^1.9 with a second level of 2^-6.
      FillRandom(reinterpret_cast<uint32_t*>(scales), shape.ScaleBytes(spec_.recipe) / 4, seed + 1,
                 mx ? 0x03030303u : 0x1f1f1f1fu, mx ? 0x76767676u : 0x28282828u, nullptr);
      BENCH_CHECK(cuda::LaunchPack(spec_, mine.packed, slot, static_cast<Matrix>(m), codes, scales,
                                   mx ? 1.0f : 0.015625f, scratch, nullptr));
    }
  }
  BENCH_CHECK(cudaDeviceSynchronize());
}

void LayerGroup::MakeExchange(int rank) {
  Rank& mine = *ranks_[rank];
  cuda::HostExchangeOptions exchange;
  exchange.shape = {.num_ranks = options_.num_ranks,
                    .max_tokens_per_rank = options_.max_tokens,
                    .max_top_k = options_.geometry.top_k,
                    .slots_per_rank = options_.geometry.experts,
                    .hidden_size = options_.geometry.hidden,
                    .intermediate_size = options_.geometry.intermediate,
                    .partials_bf16 = options_.partials_bf16};
  exchange.placement = {mine.count_up, mine.count_up};
  exchange.num_sms = mine.gpu.num_sms;
  exchange.limit = absl::Seconds(10);
  exchange.group = site_->communicator(rank);
  auto made = cuda::HostExchange::Create(exchange);
  BENCH_CHECK(made.status());
  mine.exchange = *std::move(made);
}

layout::WorkspaceShape LayerGroup::WorkspaceShape(int tokens) const {
  const Geometry& g = options_.geometry;
  return {options_.num_ranks, tokens, g.top_k, g.experts, g.hidden, g.intermediate};
}

// Every GPU gets the pairs that one GPU alone gets of the same T: all ranks' tokens choose the same
// experts of the fold, and the k-th of them lies on the k-th rank from the token's own.
std::vector<int32_t> LayerGroup::RankIds(int tokens, int rank, int routing) const {
  const Geometry& g = options_.geometry;
  std::vector<int32_t> ids = RandomIds(tokens, g.experts, g.top_k, 100 + routing);
  for (size_t i = 0; i < ids.size(); ++i) {
    const int choice = static_cast<int>(i) % g.top_k;
    ids[i] += (rank + choice) % options_.num_ranks * g.experts;
  }
  return ids;
}

void LayerGroup::SetTokens(int tokens) {
  tokens_ = tokens;
  const Geometry& g = options_.geometry;
  const auto config =
      cuda::ChooseKernelConfig({cuda::FormatOf(options_.recipe), g.hidden, g.intermediate,
                                num_experts(), g.experts, options_.num_ranks},
                               tokens, g.top_k, site_->num_ctas());
  BENCH_CHECK(config.status());
  config_ = *config;
  // The kernel's workspace has another layout for every T: as new. All ranks are idle here.
  const bool renew = options_.exchange == Exchange::kLsa;
  if (renew) step_ = 0;
  BENCH_CHECK(site_->ForEach([&](int rank, cudaStream_t) {
    Rank& mine = *ranks_[rank];
    if (renew) {
      BENCH_CHECK(cudaMemset(site_->peers(rank).at<char>(rank, 0), 0,
                             static_cast<size_t>(site_->workspace_bytes())));
    }
    mine.host_ids.clear();
    for (int r = 0; r < kRoutings; ++r) {
      const auto some = RankIds(tokens, rank, r);
      mine.host_ids.insert(mine.host_ids.end(), some.begin(), some.end());
    }
    std::mt19937 random(2 + rank);
    mine.host_weights.resize(mine.host_ids.size());
    for (float& weight : mine.host_weights) weight = 0.05f + random() % 1000 * 2e-4f;
    std::vector<int32_t> rows(tokens);
    std::iota(rows.begin(), rows.end(), 0);
    mine.step.Clear();
    mine.ids = mine.step.Device(mine.host_ids);
    mine.weights = mine.step.Device(mine.host_weights);
    mine.row_in_request = mine.step.Device(rows);
    return EXPERTD_CUDA_STATUS(cudaDeviceSynchronize());
  }));
}

uint32_t LayerGroup::TakeSteps(int count) {
  const uint32_t first = step_ + 1;
  step_ += static_cast<uint32_t>(count);
  return first;
}

cuda::moe_layer::MoeLayerParams LayerGroup::Params(const Rank& mine, int rank) const {
  cuda::moe_layer::MoeLayerParams params;
  params.hidden = options_.geometry.hidden;
  params.intermediate = options_.geometry.intermediate;
  params.num_experts = num_experts();
  params.num_slots = params.slots_per_rank = options_.geometry.experts;
  params.first_slot = params.slots = mine.count_up;
  params.fc1_units = mine.packed.fc1_units;
  params.fc2_units = mine.packed.fc2_units;
  params.fc1_factors = mine.packed.fc1_factors;
  params.fc2_factors = mine.packed.fc2_factors;
  params.swiglu_limit = kSwigluLimit;
  params.peers = site_->peers(rank);
  params.partials_bf16 = options_.partials_bf16;
  params.workspace = layout::PlanWorkspace(WorkspaceShape(tokens_));
  auto* control = static_cast<Control*>(const_cast<void*>(mine.device_control));
  params.stop = &control->stop;
  params.fault = &control->fault;
  params.timeout_ns = kTimeoutNs;
  return params;
}

cuda::UnfusedStep LayerGroup::StepOf(const Rank& mine, int routing) const {
  const int64_t first = int64_t{routing} * tokens_ * options_.geometry.top_k;
  return {.num_tokens = tokens_,
          .top_k = options_.geometry.top_k,
          .hidden = mine.x,
          .ids = mine.ids + first,
          .weights = mine.weights + first,
          .row_in_request = mine.row_in_request,
          .output = mine.output,
          .output_dtype = DType::kBf16};
}

void LayerGroup::Launch(int rank, int routing, uint32_t step, cudaStream_t stream,
                        uint64_t* timing) {
  const Rank& mine = *ranks_[rank];
  const cuda::UnfusedStep input = StepOf(mine, routing);
  if (mine.exchange != nullptr) {
    BENCH_CHECK(mine.exchange->Enqueue(spec_, mine.packed, input, step, stream));
    return;
  }
  cuda::moe_layer::MoeLayerParams params = Params(mine, rank);
  params.num_tokens = input.num_tokens;
  params.top_k = input.top_k;
  params.x = input.hidden;
  params.ids = input.ids;
  params.weights = input.weights;
  params.row_in_request = input.row_in_request;
  params.output = input.output;
  params.step = step;
  params.timing = timing;
  BENCH_CHECK(cuda::moe_layer::Launch(cuda::FormatOf(options_.recipe), config_, params, stream));
}

void LayerGroup::Finish(int rank) {
  if (ranks_[rank]->exchange != nullptr) BENCH_CHECK(ranks_[rank]->exchange->Finish());
}

void LayerGroup::Meet(int rank, uint32_t meeting, cudaStream_t stream) {
  if (options_.num_ranks == 1) return;
  meet<<<1, 1, 0, stream>>>(site_->peers(rank), site_->workspace_bytes() - kMeetBytes, meeting);
}

void LayerGroup::CheckFaults() {
  BENCH_CHECK(site_->Synchronise());
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    const cuda::moe_layer::FaultRecord& fault = *ranks_[rank]->fault;
    if (fault.code == 0) continue;
    std::fprintf(stderr, "rank %d: fault %u, peer %u, tile %u, found %u, expected %u\n", rank,
                 fault.code, fault.peer, fault.tile, fault.found, fault.expected);
    std::_Exit(1);
  }
}

int64_t LayerGroup::workspace_bytes() const {
  if (options_.exchange == Exchange::kLsa) {
    return layout::PlanWorkspace(WorkspaceShape(tokens_)).bytes;
  }
  const Geometry& g = options_.geometry;
  return cuda::HostExchange::DeviceBytes({options_.num_ranks, tokens_, g.top_k, g.experts, g.hidden,
                                          g.intermediate, options_.partials_bf16});
}

double LayerGroup::weight_bytes() const {
  const int64_t slot_bytes =
      cuda::PackedFc1(spec_).slot_bytes() + cuda::PackedFc2(spec_).slot_bytes();
  int64_t active = 0;
  for (int r = 0; r < kRoutings; ++r) {
    std::vector<bool> needed(num_experts());
    const int64_t routes = int64_t{tokens_} * options_.geometry.top_k;
    for (const auto& mine : ranks_) {
      for (int64_t i = 0; i < routes; ++i) needed[mine->host_ids[r * routes + i]] = true;
    }
    active += std::count(needed.begin(), needed.end(), true);
  }
  return static_cast<double>(active) * static_cast<double>(slot_bytes) /
         (kRoutings * options_.num_ranks);
}

double LayerGroup::flops() const {
  const Geometry& g = options_.geometry;
  return 6.0 * tokens_ * g.top_k * g.hidden * g.intermediate;
}

// A BF16 row once to every other rank with a route of it; its ids, weights and row number to all.
double LayerGroup::dispatch_bytes() const {
  const Geometry& g = options_.geometry;
  int64_t largest = 0;
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    const std::vector<int32_t>& ids = ranks_[rank]->host_ids;
    int64_t rows = 0;
    for (size_t first = 0; first < ids.size(); first += g.top_k) {
      uint64_t owners = 0;
      for (int k = 0; k < g.top_k; ++k) owners |= uint64_t{1} << (ids[first + k] / g.experts);
      rows += __builtin_popcountll(owners & ~(uint64_t{1} << rank));
    }
    largest = std::max(largest, rows);
  }
  const double routes = double(options_.num_ranks - 1) * tokens_ * (g.top_k * 8.0 + 4.0);
  return static_cast<double>(largest) / kRoutings * g.hidden * 2.0 + routes;
}

// A partial row comes back for every row that went out; with uniform routing as many leave a rank.
double LayerGroup::link_bytes() const {
  const Geometry& g = options_.geometry;
  const double routes = double(options_.num_ranks - 1) * tokens_ * (g.top_k * 8.0 + 4.0);
  const double rows = (dispatch_bytes() - routes) / (g.hidden * 2.0);
  return dispatch_bytes() + rows * g.hidden * (options_.partials_bf16 ? 2.0 : 4.0);
}

std::vector<float> LayerGroup::PlainPartials(int rank, int routing, int first,
                                             cudaStream_t stream) {
  const Geometry& g = options_.geometry;
  std::vector<uint16_t> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (const auto& home : ranks_) {
    const int64_t begin = (int64_t{routing} * tokens_ + first) * g.top_k;
    const int64_t end = int64_t{routing + 1} * tokens_ * g.top_k;
    x.insert(x.end(), home->host_x.begin() + int64_t{first} * g.hidden,
             home->host_x.begin() + int64_t{tokens_} * g.hidden);
    ids.insert(ids.end(), home->host_ids.begin() + begin, home->host_ids.begin() + end);
    weights.insert(weights.end(), home->host_weights.begin() + begin,
                   home->host_weights.begin() + end);
  }
  for (int32_t& id : ids) id = id / g.experts == rank ? id % g.experts : -1;
  const Rank& mine = *ranks_[rank];
  const int rows = (tokens_ - first) * options_.num_ranks;
  Arena arena;
  float* output = arena.Device<float>(int64_t{rows} * g.hidden);
  LayerSpec spec = spec_;
  spec.num_experts = g.experts;
  const cuda::UnfusedStep step = {.num_tokens = rows,
                                  .top_k = g.top_k,
                                  .hidden = arena.Device(x),
                                  .ids = arena.Device(ids),
                                  .weights = arena.Device(weights),
                                  .row_in_request = arena.Device(std::vector<int32_t>(rows, 0)),
                                  .output = output,
                                  .output_dtype = DType::kF32};
  void* workspace = arena.Device<uint8_t>(
      static_cast<int64_t>(cuda::UnfusedWorkspaceBytes(spec, g.experts, rows, g.top_k)));
  BENCH_CHECK(cudaDeviceSynchronize());
  BENCH_CHECK(cuda::LaunchUnfusedMoe(spec, g.experts, mine.packed, {mine.count_up, mine.count_up},
                                     step, workspace, stream));
  BENCH_CHECK(cudaStreamSynchronize(stream));
  std::vector<float> partials(int64_t{rows} * g.hidden);
  BENCH_CHECK(cudaMemcpy(partials.data(), output, partials.size() * 4, cudaMemcpyDeviceToHost));
  return partials;
}

}  // namespace expertd::bench
