#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "config/model_spec.h"
#include "kernels/cuda/exchange_plan.h"
#include "kernels/layout/workspace.h"

// What a rank's device memory is spent on: pure arithmetic, before anything is allocated.
namespace expertd::cuda {

enum class KernelPath {
  kFused,         // the one-launch kernel; several ranks exchange rows inside it
  kUnfused,       // the plain kernels, the oracle; one rank
  kHostExchange,  // several ranks: the kernel on each by itself, rows through host-launched NCCL
};

struct MemoryQuestion {
  absl::Span<const LayerSpec> layers;
  int32_t num_slots = 0;            // expert slots of the rank
  int32_t max_tokens_per_rank = 0;  // T
  KernelPath path = KernelPath::kFused;
  int32_t num_ranks = 1;
  bool partials_bf16 = false;
};

// Device bytes.
struct MemoryPlan {
  int64_t weights = 0;    // packed, all layers
  int64_t staging = 0;    // only while weights load
  int64_t workspace = 0;  // pooled over the layers, for the worst routing of a part of a step
  int64_t step = 0;       // inputs and outputs of a step
  int64_t nccl = 0;       // several ranks: what NCCL keeps to connect them

  int64_t total() const { return weights + staging + workspace + step + nccl; }
};

// K that the workspace is sized for: the largest that a served layer was trained with. A step with
// a larger K is legal; it runs in parts of PartTokens rows a rank.
int32_t PlannedTopK(const MemoryQuestion& question);

// Rows of a rank that one launch takes at `top_k`, at most T and at least 1.
int32_t PartTokens(const MemoryQuestion& question, int32_t top_k);

// The fused kernel's workspace for one layer of the question, the same on every rank.
layout::WorkspaceShape ShapeOfWorkspace(const LayerSpec& spec, const MemoryQuestion& question);

// The host-launched exchange, the same on every rank.
ExchangeShape ShapeOfExchange(const MemoryQuestion& question);

MemoryPlan PlanMemory(const MemoryQuestion& question);

// RESOURCE_EXHAUSTED if the plan does not fit into `free_bytes` less limits::kCudaReserveBytes,
// with the parts and the largest max_tokens_per_rank that fits, or that the weights alone do not.
absl::Status CheckMemory(const MemoryQuestion& question, int64_t free_bytes);

// One matrix while it is loaded: codes, scales and scratch, each from a multiple of 256 bytes.
struct StagingLayout {
  int64_t scales = 0;   // offset; codes are at 0
  int64_t scratch = 0;  // offset; device only
  int64_t bytes = 0;
};
StagingLayout PlanStaging(absl::Span<const LayerSpec> layers);
int32_t NumStagingBuffers(const StagingLayout& staging);

// Device buffers of a step, offsets into one block.
struct StepLayout {
  int64_t hidden_f32 = 0;  // [T, H], as it came
  int64_t hidden = 0;      // [T, H] BF16
  int64_t ids = 0;         // [T, kMaxTopK]
  int64_t weights = 0;     // [T, kMaxTopK]
  int64_t rows = 0;        // [T] row_in_request
  int64_t output = 0;      // [T, H] F32 or BF16
  int64_t bytes = 0;
};
StepLayout PlanStep(absl::Span<const LayerSpec> layers, int32_t max_tokens);

}  // namespace expertd::cuda
