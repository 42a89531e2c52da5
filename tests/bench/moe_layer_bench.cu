// Times the fused MoE layer on one GPU: from BF16 hidden states, ids and weights in device memory
// to the reduced BF16 rows in device memory, routing and combine included.
//   burst:     median of launches that each follow a read which displaces L2, over several routings
//   sustained: mean of back-to-back launches over a second, when the card has settled at its power
//   limit
// The ceilings (streaming read; the vendor library's BF16 product, if found) are measured in the
// same run. One JSON object a line is appended to --out.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/launch.h"
#include "kernels/cuda/moe_layer/traits.h"
#include "kernels/cuda/pack_weights.h"
#include "kernels/cuda/ptx/copy.cuh"
#include "kernels/cuda/ptx/mbarrier.cuh"
#include "kernels/cuda/ptx/memory.cuh"
#include "kernels/cuda/unfused_moe.h"
#include "kernels/formats.h"

namespace expertd::cuda {
namespace {

constexpr int kRoutings = 3;
constexpr int kBurstsPerRouting = 5;
constexpr int64_t kDisplaceBytes = 256ll << 20;
constexpr int kReferenceRows = 32;
constexpr double kSustainSeconds = 1.0;

struct Geometry {
  const char* name;
  int hidden, intermediate, experts, top_k;
};
constexpr Geometry kGeometries[] = {{"pro_fold", 7168, 3072, 48, 6},
                                    {"v3_fold", 7168, 2048, 32, 8},
                                    {"gptoss", 2880, 2880, 128, 4},
                                    {"qwen3", 4096, 1536, 128, 8},
                                    {"flash_fold", 4096, 2048, 32, 6}};

void Check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
void Check(const absl::Status& status, int line) {
  if (status.ok()) return;
  std::fprintf(stderr, "line %d: %s\n", line, std::string(status.message()).c_str());
  std::exit(1);
}
#define BENCH_CHECK(expression) Check(expression, __LINE__)

template <typename T>
T* Device(int64_t count) {
  void* memory = nullptr;
  BENCH_CHECK(cudaMalloc(&memory, std::max<int64_t>(count, 1) * sizeof(T)));
  return static_cast<T*>(memory);
}
template <typename T>
void Upload(T* to, const std::vector<T>& from) {
  BENCH_CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}

// --- data and ceilings

__global__ void fill_random(uint32_t* words, int64_t count, uint32_t seed, uint32_t mask,
                            uint32_t base) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1u ^ seed * 0x85EBCA77u;
    x ^= x >> 15;
    x *= 0x2C1B3C6Du;
    x ^= x >> 12;
    x *= 0x297A2D39u;
    x ^= x >> 15;
    words[i] = (x & mask) + base;
  }
}

__global__ void read_all(const uint4* data, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 value = data[i];
    sum ^= value.x ^ value.y ^ value.z ^ value.w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

// Streams memory through a ring of bulk copies that nobody reads: the read ceiling.
constexpr int kStreamBytes = 17408, kStreamStages = 11;
__global__ void stream_all(const uint8_t* data, int64_t chunks) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t barriers[kStreamStages];
  if (threadIdx.x != 0) return;
  for (auto& barrier : barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
  ptx::fence_mbarrier_init();
  const uint64_t policy = ptx::policy_evict_first();
  const int64_t begin = chunks * blockIdx.x / gridDim.x,
                end = chunks * (blockIdx.x + 1) / gridDim.x;
  int64_t loaded = begin;
  const auto load = [&](int stage) {
    const uint32_t barrier = ptx::shared_address(&barriers[stage]);
    ptx::mbarrier_arrive_expect_tx(barrier, kStreamBytes);
    ptx::bulk_copy(ptx::shared_address(ring) + stage * kStreamBytes, data + loaded * kStreamBytes,
                   kStreamBytes, barrier, policy);
    ++loaded;
  };
  for (int stage = 0; stage < kStreamStages && loaded < end; ++stage) load(stage);
  int stage = 0;
  uint32_t phase = 0;
  for (int64_t i = begin; i < end; ++i) {
    while (!ptx::mbarrier_try_wait(ptx::shared_address(&barriers[stage]), phase)) {
    }
    if (loaded < end) load(stage);
    if (++stage == kStreamStages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// SM clock over about 50 us: [0] clocks, [1] nanoseconds.
__global__ void read_clock(uint64_t* out) {
  const uint64_t begin_ns = ptx::globaltimer_ns();
  const long long begin = clock64();
  while (ptx::globaltimer_ns() - begin_ns < 50000) {
  }
  out[0] = clock64() - begin;
  out[1] = ptx::globaltimer_ns() - begin_ns;
}

class Timer {
 public:
  Timer() {
    BENCH_CHECK(cudaEventCreate(&begin_));
    BENCH_CHECK(cudaEventCreate(&end_));
  }
  template <typename Work>
  float Us(Work work) {
    BENCH_CHECK(cudaEventRecord(begin_));
    work();
    BENCH_CHECK(cudaEventRecord(end_));
    BENCH_CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    BENCH_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1000;
  }

 private:
  cudaEvent_t begin_, end_;
};

struct Machine {
  int num_sms = 0;
  char gpu[256] = "";
  uint8_t* displace = nullptr;
  uint32_t* sink = nullptr;
  uint64_t* clock = nullptr;
  double read_ceiling = 0;
  double vendor_tflops = 0;  // 0: no library
};

double SmMhz(const Machine& machine) {
  read_clock<<<1, 1>>>(machine.clock);
  uint64_t value[2];
  BENCH_CHECK(cudaMemcpy(value, machine.clock, sizeof(value), cudaMemcpyDeviceToHost));
  return static_cast<double>(value[0]) / value[1] * 1e3;
}

void DisplaceL2(const Machine& machine) {
  read_all<<<machine.num_sms * 4, 512>>>(reinterpret_cast<const uint4*>(machine.displace),
                                         kDisplaceBytes / 16, machine.sink);
}

double ReadCeiling(const Machine& machine) {
  const int64_t chunks = (3ll << 30) / kStreamBytes;
  uint8_t* data = Device<uint8_t>(chunks * kStreamBytes);
  fill_random<<<1024, 256>>>(reinterpret_cast<uint32_t*>(data), chunks * kStreamBytes / 4, 1, ~0u,
                             0);
  BENCH_CHECK(cudaFuncSetAttribute(stream_all, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kStreamBytes * kStreamStages));
  Timer timer;
  std::vector<float> us;
  for (int i = 0; i < 9; ++i) {
    us.push_back(timer.Us(
        [&] { stream_all<<<machine.num_sms, 32, kStreamBytes * kStreamStages>>>(data, chunks); }));
  }
  BENCH_CHECK(cudaGetLastError());
  std::sort(us.begin(), us.end());
  BENCH_CHECK(cudaFree(data));
  return chunks * double{kStreamBytes} / us[us.size() / 2] * 1e-3;
}

// 8192^3 BF16 by cublasGemmEx, if the library can be loaded.
double VendorTflops(const char* path) {
  void* library = dlopen(path, RTLD_NOW);
  if (library == nullptr) return 0;
  using Create = int (*)(void**);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       const void*, int, int, const void*, void*, int, int, int, int);
  const auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
  const auto gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
  void* handle = nullptr;
  if (!create || !gemm || create(&handle) != 0) return 0;
  constexpr int kSize = 8192, kBf16 = 14, kComputeF32 = 68;
  uint32_t* memory[3];
  for (auto& matrix : memory) {
    matrix = Device<uint32_t>(int64_t{kSize} * kSize / 2);
    fill_random<<<1024, 256>>>(matrix, int64_t{kSize} * kSize / 2, 7, 0x807f807fu, 0x3f003f00u);
  }
  const float one = 1, zero = 0;
  Timer timer;
  std::vector<float> us;
  for (int i = 0; i < 9; ++i) {
    us.push_back(timer.Us([&] {
      gemm(handle, 1, 0, kSize, kSize, kSize, &one, memory[0], kBf16, kSize, memory[1], kBf16,
           kSize, &zero, memory[2], kBf16, kSize, kComputeF32, -1);
    }));
  }
  for (auto* matrix : memory) BENCH_CHECK(cudaFree(matrix));
  std::sort(us.begin(), us.end());
  return 2.0 * kSize * kSize * kSize / us[us.size() / 2] * 1e-6;
}

// --- one layer

struct Layer {
  Geometry geometry;
  LayerSpec spec;
  PackedLayer packed;
  void* block = nullptr;
  PlacementTable table;
  int64_t slot_bytes = 0;
};

Layer MakeLayer(const Geometry& geometry, Recipe recipe) {
  Layer layer{geometry, {}, {}, nullptr, {}, 0};
  layer.spec.hidden_size = geometry.hidden;
  layer.spec.intermediate_size = geometry.intermediate;
  layer.spec.num_experts = geometry.experts;
  layer.spec.top_k = geometry.top_k;
  layer.spec.recipe = recipe;
  layer.spec.swiglu_limit = 10;
  layer.block = Device<uint8_t>(PackedLayerBytes(layer.spec, geometry.experts));
  layer.packed = SetPackedLayer(layer.spec, geometry.experts, layer.block);
  layer.slot_bytes = PackedFc1(layer.spec).slot_bytes() + PackedFc2(layer.spec).slot_bytes();
  const MatrixShape largest = ShapeOf(layer.spec, Matrix::kGate);
  uint8_t* codes = Device<uint8_t>(largest.CodeBytes());
  uint8_t* scales = Device<uint8_t>(largest.ScaleBytes(recipe));
  void* scratch = Device<uint8_t>(PackScratchBytes(layer.spec));
  const bool mx = recipe == Recipe::kMxfp4;
  for (int slot = 0; slot < geometry.experts; ++slot) {
    for (int m = 0; m < kNumMatrices; ++m) {
      const MatrixShape shape = ShapeOf(layer.spec, static_cast<Matrix>(m));
      const uint32_t seed = slot * 16 + m * 2 + 1;
      fill_random<<<1024, 256>>>(reinterpret_cast<uint32_t*>(codes), shape.CodeBytes() / 4, seed,
                                 ~0u, 0);
      // MXFP4: 2^-9 .. 2^-6; NVFP4: codes of 2^-2 .. 2^1.9 with a second level of 2^-6.
      fill_random<<<1024, 256>>>(reinterpret_cast<uint32_t*>(scales), shape.ScaleBytes(recipe) / 4,
                                 seed + 1, mx ? 0x03030303u : 0x1f1f1f1fu,
                                 mx ? 0x76767676u : 0x28282828u);
      BENCH_CHECK(LaunchPack(layer.spec, layer.packed, slot, static_cast<Matrix>(m), codes, scales,
                             mx ? 1.0f : 0.015625f, scratch, nullptr));
    }
  }
  std::vector<int32_t> first(geometry.experts + 1);
  std::iota(first.begin(), first.end(), 0);
  int32_t* table = Device<int32_t>(geometry.experts + 1);
  Upload(table, first);
  layer.table = {table, table};
  BENCH_CHECK(cudaDeviceSynchronize());
  BENCH_CHECK(cudaFree(codes));
  BENCH_CHECK(cudaFree(scales));
  BENCH_CHECK(cudaFree(scratch));
  return layer;
}

// K different experts a token, every set as likely.
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

struct Row {
  double us_median = 0, us_min = 0, us_sustained = 0, mhz = 0, mhz_sustained = 0, bytes = 0,
         flops = 0, rel_err = 0;
  int64_t workspace_bytes = 0;
  KernelConfig config;
};

class LayerBench {
 public:
  LayerBench(const Machine& machine, const Layer& layer, int tokens)
      : machine_(machine), layer_(layer), tokens_(tokens) {
    const Geometry& g = layer.geometry;
    const auto config = ChooseKernelConfig(
        {FormatOf(layer.spec.recipe), g.hidden, g.intermediate, g.experts, g.experts, 1}, tokens,
        g.top_k, machine.num_sms);
    BENCH_CHECK(config.status());
    row_.config = *config;
    params_.workspace =
        layout::PlanWorkspace({1, tokens, g.top_k, g.experts, g.hidden, g.intermediate});
    row_.workspace_bytes = params_.workspace.bytes;
    params_.peers.base = Device<char>(params_.workspace.bytes);
    BENCH_CHECK(cudaMemset(params_.peers.base, 0, params_.workspace.bytes));
    uint32_t* control = nullptr;
    BENCH_CHECK(cudaHostAlloc(&control, 4096, cudaHostAllocMapped));
    std::memset(control, 0, 4096);
    fault_ = reinterpret_cast<moe_layer::FaultRecord*>(control + 64);
    params_.stop = control;
    params_.fault = fault_;
    params_.timeout_ns = 2'000'000'000;
    params_.num_tokens = tokens;
    params_.top_k = g.top_k;
    params_.hidden = g.hidden;
    params_.intermediate = g.intermediate;
    params_.num_experts = g.experts;
    params_.num_slots = g.experts;
    params_.slots_per_rank = g.experts;
    params_.first_slot = layer.table.first_slot;
    params_.slots = layer.table.slots;
    params_.fc1_units = layer.packed.fc1_units;
    params_.fc2_units = layer.packed.fc2_units;
    params_.fc1_factors = layer.packed.fc1_factors;
    params_.fc2_factors = layer.packed.fc2_factors;
    params_.swiglu_limit = layer.spec.swiglu_limit;
    MakeInputs();
  }
  ~LayerBench() {
    for (void* memory : {static_cast<void*>(params_.peers.base), static_cast<void*>(x_),
                         static_cast<void*>(ids_), static_cast<void*>(weights_), output_}) {
      cudaFree(memory);
    }
    cudaFreeHost(const_cast<uint32_t*>(params_.stop));
  }

  void Compare() { row_.rel_err = RelErr(); }

  // On a card that was idle for a moment: see Idle.
  void Burst() {
    std::vector<float> us;
    for (int i = 0; i < kRoutings * kBurstsPerRouting; ++i) {
      DisplaceL2(machine_);
      us.push_back(timer_.Us([&] { Launch(i % kRoutings); }));
      if (i == kRoutings * kBurstsPerRouting / 2) row_.mhz = SmMhz(machine_);
    }
    std::sort(us.begin(), us.end());
    row_.us_median = us[us.size() / 2];
    row_.us_min = us[0];
    PrintTiming();
    CheckFault();
  }

  void Sustain() {
    const int per_half =
        std::max(3, static_cast<int>(kSustainSeconds / 2 / (row_.us_median * 1e-6)));
    for (int i = 0; i < per_half; ++i) Launch(i % kRoutings);
    const int measured = per_half / kRoutings * kRoutings;
    row_.us_sustained = timer_.Us([&] {
      for (int i = 0; i < measured; ++i) Launch(i % kRoutings);
    }) / measured;
    row_.mhz_sustained = SmMhz(machine_);
    CheckFault();
  }

  const Row& row() const { return row_; }
  int tokens() const { return tokens_; }

 private:
  void MakeInputs() {
    const Geometry& g = layer_.geometry;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> x(int64_t{tokens_} * g.hidden);
    for (auto& value : x) value = FloatToBf16(normal(random));
    x_ = Device<uint16_t>(x.size());
    Upload(x_, x);
    std::vector<int32_t> ids;
    std::vector<float> weights;
    for (int r = 0; r < kRoutings; ++r) {
      const auto some = RandomIds(tokens_, g.experts, g.top_k, 100 + r);
      ids.insert(ids.end(), some.begin(), some.end());
      std::vector<bool> active(g.experts);
      for (int id : some) active[id] = true;
      row_.bytes +=
          std::count(active.begin(), active.end(), true) * double(layer_.slot_bytes) / kRoutings;
    }
    for (size_t i = 0; i < ids.size(); ++i) weights.push_back(0.05f + random() % 1000 * 2e-4f);
    ids_ = Device<int32_t>(ids.size());
    weights_ = Device<float>(weights.size());
    Upload(ids_, ids);
    Upload(weights_, weights);
    output_ = Device<float>(int64_t{tokens_} * g.hidden);
    row_.flops = 6.0 * tokens_ * g.top_k * g.hidden * g.intermediate;
  }

  void Launch(int routing) {
    const int64_t offset = int64_t{routing} * tokens_ * layer_.geometry.top_k;
    params_.x = x_;
    params_.ids = ids_ + offset;
    params_.weights = weights_ + offset;
    params_.output = output_;
    ++params_.step;
    BENCH_CHECK(moe_layer::Launch(FormatOf(layer_.spec.recipe), row_.config, params_, nullptr));
  }

  // Where the time of one launch goes, if the kernel notes it: per mark, over the CTAs, since the
  // first CTA's start.
  void PrintTiming() {
    if (!moe_layer::kRecordTiming) return;
    const int count = machine_.num_sms * moe_layer::kTimingMarks;
    params_.timing = Device<uint64_t>(count);
    BENCH_CHECK(cudaMemset(params_.timing, 0, count * 8));
    DisplaceL2(machine_);
    Launch(0);
    CheckFault();
    std::vector<uint64_t> marks(count);
    BENCH_CHECK(cudaMemcpy(marks.data(), params_.timing, count * 8, cudaMemcpyDeviceToHost));
    BENCH_CHECK(cudaFree(params_.timing));
    params_.timing = nullptr;
    const auto at = [&](int cta, int mark) { return marks[cta * moe_layer::kTimingMarks + mark]; };
    uint64_t start = ~0ull;
    for (int c = 0; c < machine_.num_sms; ++c)
      start = std::min(start, at(c, moe_layer::kMarkStart));
    const char* names[] = {"start", "routed", "sent", "list end", "combine", "outputs", "end"};
    for (int mark = 0; mark <= moe_layer::kMarkEnd; ++mark) {
      std::vector<double> us;
      for (int c = 0; c < machine_.num_sms; ++c) us.push_back((at(c, mark) - start) * 1e-3);
      std::sort(us.begin(), us.end());
      std::printf("    %-10s first %7.1f median %7.1f last %7.1f us\n", names[mark], us.front(),
                  us[us.size() / 2], us.back());
    }
  }

  void CheckFault() {
    BENCH_CHECK(cudaDeviceSynchronize());
    if (fault_->code == 0) return;
    std::fprintf(stderr, "fault %u tile %u found %u expected %u\n", fault_->code, fault_->tile,
                 fault_->found, fault_->expected);
    std::exit(1);
  }

  // Output of every routing against the plain kernels, which keep f32 between the steps; sampled
  // rows.
  double RelErr() {
    const Geometry& g = layer_.geometry;
    const int rows = std::min(tokens_, kReferenceRows);
    float* expected = Device<float>(int64_t{rows} * g.hidden);
    void* workspace = Device<uint8_t>(UnfusedWorkspaceBytes(layer_.spec, g.experts, rows, g.top_k));
    int32_t* row_in_request = Device<int32_t>(rows);
    BENCH_CHECK(cudaMemset(row_in_request, 0, rows * 4));
    double worst = 0;
    for (int r = 0; r < kRoutings; ++r) {
      BENCH_CHECK(cudaMemset(output_, 0xff, int64_t{tokens_} * g.hidden * 2));
      Launch(r);
      CheckFault();
      UnfusedStep step;
      const int first = tokens_ - rows;
      step.num_tokens = rows;
      step.top_k = g.top_k;
      step.hidden = x_ + int64_t{first} * g.hidden;
      step.ids = params_.ids + int64_t{first} * g.top_k;
      step.weights = params_.weights + int64_t{first} * g.top_k;
      step.row_in_request = row_in_request;
      step.output = expected;
      step.output_dtype = DType::kF32;
      BENCH_CHECK(LaunchUnfusedMoe(layer_.spec, g.experts, layer_.packed, layer_.table, step,
                                   workspace, nullptr));
      std::vector<float> want(int64_t{rows} * g.hidden);
      std::vector<uint16_t> got(int64_t{tokens_} * g.hidden);
      BENCH_CHECK(cudaMemcpy(want.data(), expected, want.size() * 4, cudaMemcpyDeviceToHost));
      BENCH_CHECK(cudaMemcpy(got.data(), output_, got.size() * 2, cudaMemcpyDeviceToHost));
      double difference = 0, norm = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        const double d = Bf16ToFloat(got[int64_t{first} * g.hidden + i]) - want[i];
        difference += d * d;
        norm += double{want[i]} * want[i];
      }
      const double error = std::sqrt(difference / norm);
      worst = error >= worst ? error : std::isnan(error) ? error : worst;
      for (uint16_t value : got) {
        if ((value & 0x7fff) > 0x7f80) worst = NAN;
      }
    }
    BENCH_CHECK(cudaFree(expected));
    BENCH_CHECK(cudaFree(workspace));
    BENCH_CHECK(cudaFree(row_in_request));
    return worst;
  }

  const Machine& machine_;
  const Layer& layer_;
  int tokens_;
  Timer timer_;
  Row row_;
  moe_layer::MoeLayerParams params_;
  moe_layer::FaultRecord* fault_ = nullptr;
  uint16_t* x_ = nullptr;
  int32_t* ids_ = nullptr;
  float* weights_ = nullptr;
  void* output_ = nullptr;
};

std::string Json(const Machine& machine, const Layer& layer, int tokens, const Row& row,
                 const std::string& commit) {
  char date[64];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  char vendor[32] = "null";
  if (machine.vendor_tflops > 0)
    std::snprintf(vendor, sizeof(vendor), "%.0f", machine.vendor_tflops);
  char line[1024];
  std::snprintf(
      line, sizeof(line),
      "{\"bench\": \"moe_layer\", \"geometry\": \"%s\", \"recipe\": \"%s\", \"activations\": "
      "\"bf16\", "
      "\"ranks\": 1, \"tokens\": %d, \"us_median\": %.1f, \"us_min\": %.1f, \"us_sustained\": "
      "%.1f, "
      "\"sm_mhz\": %.0f, \"sm_mhz_sustained\": %.0f, \"gb_per_s\": %.0f, \"tflops\": %.1f, "
      "\"weight_bytes\": %.0f, \"rel_err\": %.5f, \"read_ceiling_gb_per_s\": %.0f, "
      "\"vendor_bf16_tflops\": %s, \"workspace_bytes\": %lld, \"token_tile\": %d, \"stages\": %d, "
      "\"gpu\": \"%s\", \"date\": \"%s\", \"commit\": \"%s\"}",
      layer.geometry.name, std::string(RecipeName(layer.spec.recipe)).c_str(), tokens,
      row.us_median, row.us_min, row.us_sustained, row.mhz, row.mhz_sustained,
      row.bytes / row.us_median * 1e-3, row.flops / row.us_median * 1e-6, row.bytes, row.rel_err,
      machine.read_ceiling, vendor, static_cast<long long>(row.workspace_bytes),
      row.config.token_tile, row.config.num_stages, machine.gpu, date, commit.c_str());
  return line;
}

std::vector<std::string> Split(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    parts.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Machine FindMachine(const std::string& cublas) {
  Machine machine;
  cudaDeviceProp properties;
  BENCH_CHECK(cudaGetDeviceProperties(&properties, 0));
  machine.num_sms = properties.multiProcessorCount;
  std::snprintf(machine.gpu, sizeof(machine.gpu), "%s", properties.name);
  machine.displace = Device<uint8_t>(kDisplaceBytes);
  machine.sink = Device<uint32_t>(1);
  machine.clock = Device<uint64_t>(2);
  BENCH_CHECK(moe_layer::PrepareDevice());
  machine.read_ceiling = ReadCeiling(machine);
  if (!cublas.empty()) machine.vendor_tflops = VendorTflops(cublas.c_str());
  std::printf("%s, %d SMs, read ceiling %.0f GB/s, vendor BF16 %.0f TFLOP/s\n", machine.gpu,
              machine.num_sms, machine.read_ceiling, machine.vendor_tflops);
  return machine;
}

// What ran before heats the card and lowers its clock: bursts are measured after a rest.
void Idle(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

void Print(const Machine& machine, const Layer& layer, int tokens, const Row& row) {
  std::printf(
      "%-10s %s T %-5d %8.1f us (min %.1f) %5.0f GB/s = %5.1f%% %6.1f TFLOP/s | sustained %8.1f us "
      "| "
      "SM %.0f / %.0f MHz | error %.2e | %s | workspace %.1f MB\n",
      layer.geometry.name, std::string(RecipeName(layer.spec.recipe)).c_str(), tokens,
      row.us_median, row.us_min, row.bytes / row.us_median * 1e-3,
      row.bytes / row.us_median * 1e-1 / machine.read_ceiling, row.flops / row.us_median * 1e-6,
      row.us_sustained, row.mhz, row.mhz_sustained, row.rel_err, row.config.ToString().c_str(),
      row.workspace_bytes * 1e-6);
  std::fflush(stdout);
}

struct Options {
  std::string out, commit = "unknown", cublas;
  bool sustained = true;
  std::vector<std::string> jobs;
};

// GEOMETRY:RECIPE:T,T,...; all bursts, then all sustained runs.
void RunJob(const Machine& machine, const Options& options, const std::string& job) {
  const size_t colon = job.find(':'), last = job.rfind(':');
  const std::string name = job.substr(0, colon);
  const bool nv = job.substr(colon + 1, last - colon - 1) == "nvfp4";
  for (const Geometry& geometry : kGeometries) {
    if (name != geometry.name) continue;
    const Layer layer = MakeLayer(geometry, nv ? Recipe::kNvfp4 : Recipe::kMxfp4);
    std::vector<std::unique_ptr<LayerBench>> benches;
    for (const std::string& tokens : Split(job.substr(last + 1))) {
      benches.push_back(std::make_unique<LayerBench>(machine, layer, std::atoi(tokens.c_str())));
      benches.back()->Compare();
    }
    Idle(options.sustained ? 2000 : 500);
    for (auto& bench : benches) {
      Idle(200);
      bench->Burst();
    }
    for (auto& bench : benches) {
      if (options.sustained) bench->Sustain();
      Print(machine, layer, bench->tokens(), bench->row());
      if (options.out.empty()) continue;
      std::FILE* file = std::fopen(options.out.c_str(), "a");
      if (file == nullptr) std::exit(1);
      std::fprintf(file, "%s\n",
                   Json(machine, layer, bench->tokens(), bench->row(), options.commit).c_str());
      std::fclose(file);
    }
    benches.clear();
    BENCH_CHECK(cudaFree(layer.block));
    BENCH_CHECK(cudaFree(const_cast<int32_t*>(layer.table.first_slot)));
  }
}

// --out FILE, --commit ID, --cublas LIBRARY, --burst (no sustained runs), then any number of
// GEOMETRY:RECIPE:T,T,...
int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--out" && i + 1 < argc) {
      options.out = argv[++i];
    } else if (arg == "--commit" && i + 1 < argc) {
      options.commit = argv[++i];
    } else if (arg == "--cublas" && i + 1 < argc) {
      options.cublas = argv[++i];
    } else if (arg == "--burst") {
      options.sustained = false;
    } else {
      options.jobs.push_back(arg);
    }
  }
  const Machine machine = FindMachine(options.cublas);
  for (const std::string& job : options.jobs) RunJob(machine, options, job);
  return 0;
}

}  // namespace
}  // namespace expertd::cuda

int main(int argc, char** argv) { return expertd::cuda::Main(argc, argv); }
