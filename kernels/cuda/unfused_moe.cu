#include <cuda_bf16.h>

#include "config/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/unfused_moe.h"
#include "kernels/cuda/weight_source.cuh"

// Order of the kernels, all on one stream:
//   route          [T, K]: the slot of each route, -1 where masked
//   count_routes   a block a slot: how many routes it has
//   scan_counts    one block: where each slot's routes and its tiles of 64 routes start
//   list_routes    a block a slot: its routes in ascending order (deterministic, no atomics)
//   fc1_swiglu     tile of 64 intermediate columns x 64 routes: h in f32, by list position
//   fc2            tile of 64 hidden columns x 64 routes: y in f32, by route
//   combine        a block a token: the sum over k, in k order
namespace expertd::cuda {
namespace {

constexpr int kTile = 64;          // rows of a weight matrix and routes of a block
constexpr int kDepth = 32;         // K elements of a stage
constexpr int kThreads = 256;      // 16 x 16, each 4 rows x 4 routes
constexpr int kPitch = kTile + 4;  // keeps rows 16-byte aligned and stores free of bank conflicts

// Views of the workspace. Sizes in UnfusedWorkspaceBytes.
struct Scratch {
  int32_t* route_slot;   // [T, K]
  int32_t* count;        // [slots]
  int32_t* first_route;  // [slots + 1]
  int32_t* first_tile;   // [slots + 1]
  int32_t* list;         // [T * K] routes by slot, ascending
  float* h;              // [T * K, I] by list position
  float* y;              // [T * K, H] by route
};

struct Shape {
  int64_t hidden_size;
  int64_t intermediate_size;
  int32_t num_slots;
  int32_t num_routes;  // T * K
  int32_t top_k;
  float swiglu_limit;
};

constexpr size_t AlignUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Lays the views out from `base`; the bytes used are returned, so that null measures.
size_t LayOut(char* base, const Shape& shape, Scratch* scratch) {
  size_t used = 0;
  const auto take = [&](size_t bytes) {
    char* block = base == nullptr ? nullptr : base + used;
    used += AlignUp(bytes);
    return block;
  };
  const size_t routes = static_cast<size_t>(shape.num_routes);
  const size_t slots = static_cast<size_t>(shape.num_slots);
  scratch->route_slot = reinterpret_cast<int32_t*>(take(routes * 4));
  scratch->count = reinterpret_cast<int32_t*>(take(slots * 4));
  scratch->first_route = reinterpret_cast<int32_t*>(take((slots + 1) * 4));
  scratch->first_tile = reinterpret_cast<int32_t*>(take((slots + 1) * 4));
  scratch->list = reinterpret_cast<int32_t*>(take(routes * 4));
  scratch->h = reinterpret_cast<float*>(take(routes * shape.intermediate_size * 4));
  scratch->y = reinterpret_cast<float*>(take(routes * shape.hidden_size * 4));
  return used;
}

__global__ void route(UnfusedStep step, PlacementTable placement, Scratch scratch) {
  const int32_t r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= step.num_tokens * step.top_k) return;
  const int32_t expert = step.ids[r];
  int32_t slot = -1;
  if (expert >= 0) {
    const int32_t first = placement.first_slot[expert];
    const uint32_t replicas = placement.first_slot[expert + 1] - first;
    const uint32_t row = step.row_in_request[r / step.top_k];
    slot = placement.slots[first + row % replicas];
  }
  scratch.route_slot[r] = slot;
}

__global__ void count_routes(Shape shape, Scratch scratch) {
  const int32_t slot = blockIdx.x;
  int32_t count = 0;
  for (int32_t r = threadIdx.x; r < shape.num_routes; r += blockDim.x) {
    count += scratch.route_slot[r] == slot;
  }
  __shared__ int32_t total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  atomicAdd(&total, count);
  __syncthreads();
  if (threadIdx.x == 0) scratch.count[slot] = total;
}

// One thread: a few thousand additions at most.
__global__ void scan_counts(Shape shape, Scratch scratch) {
  int32_t route = 0;
  int32_t tile = 0;
  for (int32_t slot = 0; slot < shape.num_slots; ++slot) {
    scratch.first_route[slot] = route;
    scratch.first_tile[slot] = tile;
    route += scratch.count[slot];
    tile += (scratch.count[slot] + kTile - 1) / kTile;
  }
  scratch.first_route[shape.num_slots] = route;
  scratch.first_tile[shape.num_slots] = tile;
}

__global__ void list_routes(Shape shape, Scratch scratch) {
  const int32_t slot = blockIdx.x;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  __shared__ int32_t warp_count[kThreads / 32];
  int32_t position = scratch.first_route[slot];
  for (int32_t begin = 0; begin < shape.num_routes; begin += kThreads) {
    const int32_t r = begin + static_cast<int32_t>(threadIdx.x);
    const bool mine = r < shape.num_routes && scratch.route_slot[r] == slot;
    const uint32_t votes = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) warp_count[warp] = __popc(votes);
    __syncthreads();
    int32_t before = 0;
    int32_t total = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      before += w < warp ? warp_count[w] : 0;
      total += warp_count[w];
    }
    if (mine) scratch.list[position + before + __popc(votes & ((1u << lane) - 1))] = r;
    position += total;
    __syncthreads();
  }
}

// The slot and the routes of a block's tile. False: the grid is larger than what there is to do.
struct TileOfRoutes {
  int32_t slot;
  int32_t first;  // position in the list
  int32_t count;  // 1..kTile
};

__device__ bool find_tile(const Shape& shape, const Scratch& scratch, int32_t tile,
                          TileOfRoutes* found) {
  if (tile >= scratch.first_tile[shape.num_slots]) return false;
  int32_t low = 0;
  int32_t high = shape.num_slots;  // first_tile[low] <= tile < first_tile[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (scratch.first_tile[middle] <= tile ? low : high) = middle;
  }
  const int32_t skipped = (tile - scratch.first_tile[low]) * kTile;
  found->slot = low;
  found->first = scratch.first_route[low] + skipped;
  found->count = min(kTile, scratch.count[low] - skipped);
  return true;
}

using Stage = float[kDepth][kPitch];
using Sums = float[4][4];  // [row][route] of a thread

// Rows row0..row0+63, columns col0..col0+31 of a matrix into shared memory, transposed.
template <typename Source>
__device__ void load_weights(const Source& source, int32_t slot, Matrix matrix, int64_t row0,
                             int64_t col0, Stage& stage) {
  const int row = threadIdx.x % kTile;
  const int col = threadIdx.x / kTile * 8;
  float values[8];
  source.load8(slot, matrix, row0 + row, col0 + col, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) stage[col + i][row] = values[i];
}

__device__ void multiply_add(const Stage& weights, const Stage& inputs, Sums& sums) {
  const int row = threadIdx.x % 16 * 4;
  const int route = threadIdx.x / 16 * 4;
#pragma unroll 4
  for (int k = 0; k < kDepth; ++k) {
    const float4 w = *reinterpret_cast<const float4*>(&weights[k][row]);
    const float4 x = *reinterpret_cast<const float4*>(&inputs[k][route]);
    const float w4[4] = {w.x, w.y, w.z, w.w};
    const float x4[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(w4[i], x4[j], sums[i][j]);
    }
  }
}

// min and max would turn a NaN into the limit.
__device__ float clamp_above(float value, float limit) { return value > limit ? limit : value; }
__device__ float clamp_below(float value, float limit) { return value < limit ? limit : value; }

__device__ float swiglu(float gate, float up, float limit) {
  if (limit > 0) {
    gate = clamp_above(gate, limit);
    up = clamp_below(clamp_above(up, limit), -limit);
  }
  return gate / (1.0f + expf(-gate)) * up;
}

template <typename Source>
__global__ void __launch_bounds__(kThreads)
    fc1_swiglu(Source source, Shape shape, UnfusedStep step, Scratch scratch) {
  TileOfRoutes tile;
  if (!find_tile(shape, scratch, blockIdx.y, &tile)) return;
  __shared__ alignas(16) Stage gate_stage;
  __shared__ alignas(16) Stage up_stage;
  __shared__ alignas(16) Stage input_stage;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kTile;
  const int my_route = threadIdx.x % kTile;
  const int my_col = threadIdx.x / kTile * 8;
  const uint16_t* x = nullptr;
  if (my_route < tile.count) {
    const int64_t token = scratch.list[tile.first + my_route] / shape.top_k;
    x = step.hidden + token * shape.hidden_size + my_col;
  }
  Sums gate = {};
  Sums up = {};
  for (int64_t k0 = 0; k0 < shape.hidden_size; k0 += kDepth) {
    load_weights(source, tile.slot, Matrix::kGate, row0, k0, gate_stage);
    load_weights(source, tile.slot, Matrix::kUp, row0, k0, up_stage);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      input_stage[my_col + i][my_route] =
          x == nullptr ? 0.0f : __uint_as_float(uint32_t{x[k0 + i]} << 16);
    }
    __syncthreads();
    multiply_add(gate_stage, input_stage, gate);
    multiply_add(up_stage, input_stage, up);
    __syncthreads();
  }
  const int64_t row = row0 + threadIdx.x % 16 * 4;
  const int route0 = threadIdx.x / 16 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float gate_factor = source.factor(tile.slot, Matrix::kGate, row + i);
    const float up_factor = source.factor(tile.slot, Matrix::kUp, row + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (route0 + j >= tile.count) continue;
      scratch.h[(tile.first + route0 + j) * shape.intermediate_size + row + i] =
          swiglu(gate[i][j] * gate_factor, up[i][j] * up_factor, shape.swiglu_limit);
    }
  }
}

template <typename Source>
__global__ void __launch_bounds__(kThreads) fc2(Source source, Shape shape, Scratch scratch) {
  TileOfRoutes tile;
  if (!find_tile(shape, scratch, blockIdx.y, &tile)) return;
  __shared__ alignas(16) Stage weight_stage;
  __shared__ alignas(16) Stage input_stage;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kTile;
  const int my_route = threadIdx.x % kTile;
  const int my_col = threadIdx.x / kTile * 8;
  const float* h = scratch.h + (tile.first + my_route) * shape.intermediate_size + my_col;
  Sums sums = {};
  for (int64_t k0 = 0; k0 < shape.intermediate_size; k0 += kDepth) {
    load_weights(source, tile.slot, Matrix::kDown, row0, k0, weight_stage);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      input_stage[my_col + i][my_route] = my_route < tile.count ? h[k0 + i] : 0.0f;
    }
    __syncthreads();
    multiply_add(weight_stage, input_stage, sums);
    __syncthreads();
  }
  const int64_t row = row0 + threadIdx.x % 16 * 4;
  const int route0 = threadIdx.x / 16 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float factor = source.factor(tile.slot, Matrix::kDown, row + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (route0 + j >= tile.count) continue;
      scratch.y[scratch.list[tile.first + route0 + j] * shape.hidden_size + row + i] =
          sums[i][j] * factor;
    }
  }
}

__global__ void combine(Shape shape, UnfusedStep step, Scratch scratch) {
  const int64_t token = blockIdx.x;
  const int64_t first = token * shape.top_k;
  for (int64_t col = threadIdx.x; col < shape.hidden_size; col += blockDim.x) {
    float sum = 0;
    for (int32_t k = 0; k < shape.top_k; ++k) {
      if (scratch.route_slot[first + k] < 0) continue;
      sum = fmaf(step.weights[first + k], scratch.y[(first + k) * shape.hidden_size + col], sum);
    }
    const int64_t element = token * shape.hidden_size + col;
    if (step.output_dtype == DType::kF32) {
      static_cast<float*>(step.output)[element] = sum;
    } else {
      static_cast<__nv_bfloat16*>(step.output)[element] = __float2bfloat16_rn(sum);
    }
  }
}

Shape ShapeOfStep(const LayerSpec& spec, int32_t num_slots, int32_t tokens, int32_t top_k) {
  return {spec.hidden_size, spec.intermediate_size, num_slots, tokens * top_k, top_k,
          spec.swiglu_limit};
}

template <typename Source>
absl::Status Launch(const Source& source, const Shape& shape, const PlacementTable& placement,
                    const UnfusedStep& step, void* workspace, cudaStream_t stream) {
  EXPERTD_CHECK(shape.hidden_size % kTile == 0 && shape.intermediate_size % kTile == 0);
  if (step.num_tokens == 0) return absl::OkStatus();
  Scratch scratch;
  LayOut(static_cast<char*>(workspace), shape, &scratch);
  const int32_t max_tiles = shape.num_routes / kTile + shape.num_slots;
  const auto row_tiles = [](int64_t rows) { return static_cast<uint32_t>(rows / kTile); };

  route<<<(shape.num_routes + 255) / 256, 256, 0, stream>>>(step, placement, scratch);
  count_routes<<<shape.num_slots, kThreads, 0, stream>>>(shape, scratch);
  scan_counts<<<1, 1, 0, stream>>>(shape, scratch);
  list_routes<<<shape.num_slots, kThreads, 0, stream>>>(shape, scratch);
  fc1_swiglu<<<dim3(row_tiles(shape.intermediate_size), max_tiles), kThreads, 0, stream>>>(
      source, shape, step, scratch);
  fc2<<<dim3(row_tiles(shape.hidden_size), max_tiles), kThreads, 0, stream>>>(source, shape,
                                                                              scratch);
  combine<<<step.num_tokens, kThreads, 0, stream>>>(shape, step, scratch);
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

}  // namespace

size_t UnfusedWorkspaceBytes(const LayerSpec& spec, int32_t num_slots, int32_t max_tokens,
                             int32_t max_top_k) {
  Scratch unused;
  return LayOut(nullptr, ShapeOfStep(spec, num_slots, max_tokens, max_top_k), &unused);
}

absl::Status LaunchUnfusedMoe(const LayerSpec& spec, int32_t num_slots, const CanonicalLayer& layer,
                              const PlacementTable& placement, const UnfusedStep& step,
                              void* workspace, cudaStream_t stream) {
  const Shape shape = ShapeOfStep(spec, num_slots, step.num_tokens, step.top_k);
  if (spec.recipe == Recipe::kMxfp4) {
    const CanonicalSource<Recipe::kMxfp4> source{layer, spec.hidden_size, spec.intermediate_size};
    return Launch(source, shape, placement, step, workspace, stream);
  }
  const CanonicalSource<Recipe::kNvfp4> source{layer, spec.hidden_size, spec.intermediate_size};
  return Launch(source, shape, placement, step, workspace, stream);
}

absl::Status LaunchUnfusedMoe(const LayerSpec& spec, int32_t num_slots, const PackedLayer& layer,
                              const PlacementTable& placement, const UnfusedStep& step,
                              void* workspace, cudaStream_t stream) {
  const Shape shape = ShapeOfStep(spec, num_slots, step.num_tokens, step.top_k);
  if (spec.recipe == Recipe::kMxfp4) {
    const PackedSource<Recipe::kMxfp4> source{layer, PackedFc1(spec), PackedFc2(spec)};
    return Launch(source, shape, placement, step, workspace, stream);
  }
  const PackedSource<Recipe::kNvfp4> source{layer, PackedFc1(spec), PackedFc2(spec)};
  return Launch(source, shape, placement, step, workspace, stream);
}

}  // namespace expertd::cuda
