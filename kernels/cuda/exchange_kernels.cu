#include <cuda_bf16.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/exchange_kernels.h"

namespace expertd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kOwnerThreads = 1024;
constexpr int kOwnerWarps = kOwnerThreads / 32;

// Global slot of a route, -1 where masked.
__device__ int32_t slot_of(const ExchangeStep& step, int32_t token, int32_t k) {
  const int32_t expert = step.own.ids[int64_t{token} * step.own.top_k + k];
  if (expert < 0) return -1;
  const int32_t first = step.placement.first_slot[expert];
  const uint32_t replicas = step.placement.first_slot[expert + 1] - first;
  const uint32_t row = step.own.row_in_request[token];
  return step.placement.slots[first + row % replicas];
}

// Slot within `rank`, -1 if it lies on another.
__device__ int32_t slot_within(const ExchangeStep& step, int32_t slot, int32_t rank) {
  const int32_t local = slot - rank * step.slots_per_rank;
  return slot >= 0 && local >= 0 && local < step.slots_per_rank ? local : -1;
}

__device__ bool goes_to(const ExchangeStep& step, int32_t token, int32_t rank) {
  for (int32_t k = 0; k < step.own.top_k; ++k) {
    if (slot_within(step, slot_of(step, token, k), rank) >= 0) return true;
  }
  return false;
}

// A block a rank: the tokens that go there, in token order.
__global__ void __launch_bounds__(kOwnerThreads) find_owners(ExchangeStep step) {
  const int32_t rank = blockIdx.x;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  int32_t* positions = step.buffers.positions + int64_t{rank} * step.own.num_tokens;
  __shared__ int32_t warp_count[kOwnerWarps];
  int32_t rows = 0;
  for (int32_t begin = 0; begin < step.own.num_tokens; begin += kOwnerThreads) {
    const int32_t token = begin + static_cast<int32_t>(threadIdx.x);
    const bool inside = token < step.own.num_tokens;
    const bool goes = inside && goes_to(step, token, rank);
    const uint32_t votes = __ballot_sync(0xffffffffu, goes);
    if (lane == 0) warp_count[warp] = __popc(votes);
    __syncthreads();
    int32_t before = 0;
    int32_t total = 0;
    for (int w = 0; w < kOwnerWarps; ++w) {
      before += w < warp ? warp_count[w] : 0;
      total += warp_count[w];
    }
    const int32_t position = rows + before + __popc(votes & ((1u << lane) - 1));
    if (inside) positions[token] = goes ? position : -1;
    rows += total;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  ExchangeHeader header;
  header.step = step.step;
  header.layer = step.layer;
  header.tokens = step.own.num_tokens;
  header.top_k = step.own.top_k;
  header.rows = rows;
  step.buffers.sent[rank] = header;
  if (rank == step.rank) step.buffers.received[rank] = header;
}

// The counts of all ranks to the host, which waits for them.
__device__ void tell_host(const ExchangeStep& step) {
  constexpr int kWords = sizeof(ExchangeHeader) / 4;
  const auto copy = [&](const ExchangeHeader* from, ExchangeHeader* to) {
    for (int i = threadIdx.x; i < step.num_ranks * kWords; i += kThreads) {
      reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
  };
  copy(step.buffers.sent, step.notice->sent);
  copy(step.buffers.received, step.notice->received);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    *static_cast<volatile uint32_t*>(&step.notice->step) = step.step;
    __threadfence_system();
  }
}

// A block a token: its row to every rank that has a route of it, with the routes beside.
__global__ void __launch_bounds__(kThreads) pack_rows(ExchangeStep step) {
  __shared__ int64_t first_row[kMaxExchangeRanks];
  __shared__ int64_t first_record[kMaxExchangeRanks];
  const ExchangeBuffers& buffers = step.buffers;
  if (blockIdx.x == 0) tell_host(step);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < step.num_ranks) {
    BlockBegin begin;
    if (thread != step.rank) {
      begin = OutgoingBlock(buffers.sent, step.rank, thread);
      if (blockIdx.x == 0) {
        const int64_t last = begin.record + RecordsOf(buffers.sent[thread]) - 1;
        reinterpret_cast<ExchangeTag*>(buffers.peer_routes)[last] = {step.step, kRoutesTag};
      }
    }
    first_row[thread] = begin.row;
    first_record[thread] = begin.record;
  }
  __syncthreads();
  const int32_t token = blockIdx.x;
  if (token >= step.own.num_tokens) return;
  const int32_t top_k = step.own.top_k;
  const int32_t slot = thread < top_k ? slot_of(step, token, thread) : -1;
  const int32_t quads = step.hidden_size / 8;
  const uint4* from = reinterpret_cast<const uint4*>(step.own.hidden) + int64_t{token} * quads;
  for (int32_t rank = 0; rank < step.num_ranks; ++rank) {
    const int32_t position = buffers.positions[int64_t{rank} * step.own.num_tokens + token];
    if (position < 0) continue;
    const bool own = rank == step.rank;
    uint4* to = static_cast<uint4*>(own ? buffers.rows : buffers.peer_rows) +
                (first_row[rank] + position) * quads;
    for (int i = thread; i < quads; i += kThreads) to[i] = from[i];
    if (thread < top_k) {
      const int32_t local = slot_within(step, slot, rank);
      const float weight = local < 0 ? 0.0f : step.own.weights[int64_t{token} * top_k + thread];
      (own ? buffers.routes
           : buffers.peer_routes)[first_record[rank] + int64_t{position} * top_k + thread] = {
          local, weight};
    }
  }
}

// A thread a route of the layer kernel's step: rows of all ranks have one K there.
__global__ void __launch_bounds__(kThreads)
    spread_routes(ExchangeStep step, int64_t rows, int32_t top_k) {
  __shared__ int64_t first_row[kMaxExchangeRanks];
  __shared__ int64_t first_record[kMaxExchangeRanks];
  __shared__ int32_t counts[kMaxExchangeRanks];
  __shared__ int32_t source_k[kMaxExchangeRanks];
  const ExchangeBuffers& buffers = step.buffers;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < step.num_ranks) {
    const BlockBegin begin = IncomingBlock(buffers.received, step.rank, thread);
    first_row[thread] = begin.row;
    first_record[thread] = begin.record;
    counts[thread] = buffers.received[thread].rows;
    source_k[thread] = buffers.received[thread].top_k;
  }
  __syncthreads();
  const int64_t route = int64_t{blockIdx.x} * kThreads + thread;
  if (route >= rows * top_k) return;
  const int64_t row = route / top_k;
  const int32_t k = static_cast<int32_t>(route - row * top_k);
  int32_t source = 0;
  while (row < first_row[source] || row >= first_row[source] + counts[source]) ++source;
  RouteRecord record = {-1, 0};
  if (k < source_k[source]) {
    const int64_t position = row - first_row[source];
    record = buffers.routes[first_record[source] + position * source_k[source] + k];
  }
  buffers.ids[route] = record.slot;
  buffers.weights[route] = record.weight;
}

__global__ void seal_partials(ExchangeStep step, const uint32_t* fault) {
  *step.buffers.tag = {step.step, fault == nullptr ? 0 : *fault};
}

__device__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ float4 load4(const __nv_bfloat16* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
          __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u)};
}

__device__ void store4(const UnfusedStep& own, int64_t element, const float4& sum) {
  if (own.output_dtype == DType::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(own.output) + element) = sum;
    return;
  }
  const __nv_bfloat162 low = __float22bfloat162_rn({sum.x, sum.y});
  const __nv_bfloat162 high = __float22bfloat162_rn({sum.z, sum.w});
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(own.output) + element) = {
      *reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
}

// A block a token: its partial rows in rank order.
template <typename Partial>
__global__ void __launch_bounds__(kThreads) sum_partials(ExchangeStep step) {
  __shared__ const Partial* partials[kMaxExchangeRanks];
  const ExchangeBuffers& buffers = step.buffers;
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t token = blockIdx.x;
  if (blockIdx.x == 0 && thread < step.num_ranks && thread != step.rank) {
    step.notice->tags[thread] = buffers.peer_tags[thread];
  }
  if (token >= step.own.num_tokens) return;
  if (thread < step.num_ranks) {
    const int32_t position = buffers.positions[int64_t{thread} * step.own.num_tokens + token];
    const bool own = thread == step.rank;
    const int64_t row = position + (own ? 0 : OutgoingBlock(buffers.sent, step.rank, thread).row);
    const auto* rows = static_cast<const Partial*>(own ? buffers.partials : buffers.peer_rows);
    partials[thread] = position < 0 ? nullptr : rows + row * step.hidden_size;
  }
  __syncthreads();
  for (int column = thread * 4; column < step.hidden_size; column += kThreads * 4) {
    float4 sum = {0, 0, 0, 0};
    for (int32_t rank = 0; rank < step.num_ranks; ++rank) {
      if (partials[rank] == nullptr) continue;
      const float4 part = load4(partials[rank] + column);
      sum.x += part.x;
      sum.y += part.y;
      sum.z += part.z;
      sum.w += part.w;
    }
    store4(step.own, int64_t{token} * step.hidden_size + column, sum);
  }
}

// A rank without tokens has a block too: it talks to the host.
uint32_t TokenBlocks(const ExchangeStep& step) {
  return static_cast<uint32_t>(step.own.num_tokens > 0 ? step.own.num_tokens : 1);
}

}  // namespace

ExchangeBuffers BuffersOf(const ExchangeLayout& layout, void* base) {
  const auto at = [base](int64_t offset) -> void* { return static_cast<char*>(base) + offset; };
  ExchangeBuffers buffers;
  buffers.sent = static_cast<ExchangeHeader*>(at(layout.sent));
  buffers.received = static_cast<ExchangeHeader*>(at(layout.received));
  buffers.positions = static_cast<int32_t*>(at(layout.positions));
  buffers.peer_rows = at(layout.peer_rows);
  buffers.peer_routes = static_cast<RouteRecord*>(at(layout.peer_routes));
  buffers.rows = static_cast<uint16_t*>(at(layout.rows));
  buffers.routes = static_cast<RouteRecord*>(at(layout.routes));
  buffers.ids = static_cast<int32_t*>(at(layout.ids));
  buffers.weights = static_cast<float*>(at(layout.weights));
  buffers.partials = at(layout.partials);
  buffers.tag = static_cast<ExchangeTag*>(at(layout.tag));
  buffers.peer_tags = static_cast<ExchangeTag*>(at(layout.peer_tags));
  buffers.first_slot = static_cast<int32_t*>(at(layout.first_slot));
  buffers.slots = static_cast<int32_t*>(at(layout.slots));
  buffers.workspace = static_cast<char*>(at(layout.workspace));
  return buffers;
}

absl::Status LoadExchangeKernels() {
  const void* kernels[] = {reinterpret_cast<const void*>(find_owners),
                           reinterpret_cast<const void*>(pack_rows),
                           reinterpret_cast<const void*>(spread_routes),
                           reinterpret_cast<const void*>(seal_partials),
                           reinterpret_cast<const void*>(sum_partials<float>),
                           reinterpret_cast<const void*>(sum_partials<__nv_bfloat16>)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes unused;
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaFuncGetAttributes(&unused, kernel));
  }
  return absl::OkStatus();
}

absl::Status LaunchFindOwners(const ExchangeStep& step, cudaStream_t stream) {
  find_owners<<<step.num_ranks, kOwnerThreads, 0, stream>>>(step);
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

absl::Status LaunchPackRows(const ExchangeStep& step, cudaStream_t stream) {
  pack_rows<<<TokenBlocks(step), kThreads, 0, stream>>>(step);
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

absl::Status LaunchSpreadRoutes(const ExchangeStep& step, int64_t rows, int32_t top_k,
                                cudaStream_t stream) {
  const int64_t blocks = (rows * top_k + kThreads - 1) / kThreads;
  if (blocks == 0) return absl::OkStatus();
  spread_routes<<<static_cast<uint32_t>(blocks), kThreads, 0, stream>>>(step, rows, top_k);
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

absl::Status LaunchSealPartials(const ExchangeStep& step, const uint32_t* fault,
                                cudaStream_t stream) {
  seal_partials<<<1, 1, 0, stream>>>(step, fault);
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

absl::Status LaunchSumPartials(const ExchangeStep& step, cudaStream_t stream) {
  if (step.partials_bf16) {
    sum_partials<__nv_bfloat16><<<TokenBlocks(step), kThreads, 0, stream>>>(step);
  } else {
    sum_partials<float><<<TokenBlocks(step), kThreads, 0, stream>>>(step);
  }
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

}  // namespace expertd::cuda
