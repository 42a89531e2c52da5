#include "kernels/cuda/memory_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "config/limits.h"
#include "kernels/cuda/pack_weights.h"
#include "kernels/cuda/unfused_moe.h"
#include "kernels/layout/workspace.h"

namespace expertd::cuda {
namespace {

constexpr int32_t kMinStagingBuffers = 2;   // one fills while one is packed
constexpr int32_t kMaxStagingBuffers = 64;  // tiny matrices need no more

constexpr int64_t AlignUp(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t MaxHidden(absl::Span<const LayerSpec> layers) {
  int64_t size = 0;
  for (const LayerSpec& spec : layers) size = std::max(size, spec.hidden_size);
  return size;
}

int64_t WorkspaceBytes(const MemoryQuestion& question) {
  if (question.path == KernelPath::kHostExchange) {
    return ExchangeDeviceBytes(ShapeOfExchange(question));
  }
  int64_t bytes = 0;
  for (const LayerSpec& spec : question.layers) {
    if (question.path == KernelPath::kUnfused) {
      bytes = std::max<int64_t>(
          bytes, UnfusedWorkspaceBytes(spec, question.num_slots, question.max_tokens_per_rank,
                                       PlannedTopK(question)));
    } else {
      bytes = std::max(bytes, layout::PlanWorkspace(ShapeOfWorkspace(spec, question)).bytes);
    }
  }
  return bytes;
}

std::string Gib(int64_t bytes) { return absl::StrFormat("%.2f GiB", bytes / 1073741824.0); }

bool Fits(MemoryQuestion question, int32_t tokens, int64_t usable) {
  question.max_tokens_per_rank = tokens;
  return PlanMemory(question).total() <= usable;
}

// 0 if not even one row fits.
int32_t LargestFit(const MemoryQuestion& question, int64_t usable) {
  int32_t fits = 0;
  int32_t too_large = question.max_tokens_per_rank;
  while (too_large - fits > 1) {
    const int32_t middle = fits + (too_large - fits) / 2;
    (Fits(question, middle, usable) ? fits : too_large) = middle;
  }
  return fits;
}

}  // namespace

// One row with kMaxTopK routes always fits.
int32_t PlannedTopK(const MemoryQuestion& question) {
  if (question.path == KernelPath::kHostExchange) return limits::kMaxTopK;  // takes no parts
  int32_t top_k = 1;
  for (const LayerSpec& spec : question.layers) top_k = std::max(top_k, spec.top_k);
  const int32_t tokens = question.max_tokens_per_rank;
  const int32_t for_one_row = (limits::kMaxTopK + tokens - 1) / tokens;
  return std::min(std::max(top_k, for_one_row), limits::kMaxTopK);
}

int32_t PartTokens(const MemoryQuestion& question, int32_t top_k) {
  const int64_t routes = int64_t{question.max_tokens_per_rank} * PlannedTopK(question);
  return static_cast<int32_t>(std::min<int64_t>(question.max_tokens_per_rank, routes / top_k));
}

layout::WorkspaceShape ShapeOfWorkspace(const LayerSpec& spec, const MemoryQuestion& question) {
  return {.num_ranks = question.num_ranks,
          .max_tokens_per_rank = question.max_tokens_per_rank,
          .max_top_k = PlannedTopK(question),
          .num_slots = question.num_slots,
          .hidden = static_cast<int>(spec.hidden_size),
          .intermediate = static_cast<int>(spec.intermediate_size)};
}

ExchangeShape ShapeOfExchange(const MemoryQuestion& question) {
  const LayerSpec& spec = question.layers.front();  // all have one shape
  return {.num_ranks = question.num_ranks,
          .max_tokens_per_rank = question.max_tokens_per_rank,
          .max_top_k = PlannedTopK(question),
          .slots_per_rank = question.num_slots,
          .hidden_size = spec.hidden_size,
          .intermediate_size = spec.intermediate_size,
          .partials_bf16 = question.partials_bf16};
}

MemoryPlan PlanMemory(const MemoryQuestion& question) {
  MemoryPlan plan;
  for (const LayerSpec& spec : question.layers) {
    plan.weights += AlignUp(PackedLayerBytes(spec, question.num_slots));
  }
  const StagingLayout staging = PlanStaging(question.layers);
  plan.staging = staging.bytes * NumStagingBuffers(staging);
  plan.workspace = WorkspaceBytes(question);
  plan.step = PlanStep(question.layers, question.max_tokens_per_rank).bytes;
  plan.nccl = question.num_ranks > 1 ? limits::kNcclGroupBytes : 0;
  return plan;
}

absl::Status CheckMemory(const MemoryQuestion& question, int64_t free_bytes) {
  const int64_t usable = free_bytes - limits::kCudaReserveBytes;
  const MemoryPlan plan = PlanMemory(question);
  if (plan.total() <= usable) return absl::OkStatus();
  const std::string parts =
      absl::StrCat("device memory: ", Gib(plan.total()), " needed (weights ", Gib(plan.weights),
                   ", loading buffers ", Gib(plan.staging), ", workspace ", Gib(plan.workspace),
                   ", step buffers ", Gib(plan.step), plan.nccl > 0 ? ", NCCL " : "",
                   plan.nccl > 0 ? Gib(plan.nccl) : "", " for max_tokens_per_rank ",
                   question.max_tokens_per_rank, "), ", Gib(free_bytes), " free of which ",
                   Gib(limits::kCudaReserveBytes), " stay in reserve; ");
  const int32_t largest = LargestFit(question, usable);
  if (largest == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat(parts, "no max_tokens_per_rank fits: serve fewer layers (--layers)"));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(parts, "the largest max_tokens_per_rank that fits is ", largest));
}

StagingLayout PlanStaging(absl::Span<const LayerSpec> layers) {
  int64_t codes = 0;
  int64_t scales = 0;
  int64_t scratch = 0;
  for (const LayerSpec& spec : layers) {
    for (int m = 0; m < kNumMatrices; ++m) {
      const MatrixShape shape = ShapeOf(spec, static_cast<Matrix>(m));
      codes = std::max(codes, shape.CodeBytes());
      scales = std::max(scales, shape.ScaleBytes(spec.recipe));
    }
    scratch = std::max<int64_t>(scratch, PackScratchBytes(spec));
  }
  StagingLayout layout;
  layout.scales = AlignUp(codes);
  layout.scratch = layout.scales + AlignUp(scales);
  layout.bytes = layout.scratch + AlignUp(scratch);
  return layout;
}

int32_t NumStagingBuffers(const StagingLayout& staging) {
  return static_cast<int32_t>(std::clamp<int64_t>(limits::kCudaStagingBytes / staging.bytes,
                                                  kMinStagingBuffers, kMaxStagingBuffers));
}

StepLayout PlanStep(absl::Span<const LayerSpec> layers, int32_t max_tokens) {
  const int64_t elements = int64_t{max_tokens} * MaxHidden(layers);
  const int64_t routes = int64_t{max_tokens} * limits::kMaxTopK;
  StepLayout layout;
  for (const auto& [offset, bytes] :
       {std::pair(&layout.hidden_f32, elements * 4), std::pair(&layout.hidden, elements * 2),
        std::pair(&layout.ids, routes * 4), std::pair(&layout.weights, routes * 4),
        std::pair(&layout.rows, int64_t{max_tokens} * 4),
        std::pair(&layout.output, elements * 4)}) {
    *offset = layout.bytes;
    layout.bytes += AlignUp(bytes);
  }
  return layout;
}

}  // namespace expertd::cuda
