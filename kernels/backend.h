#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "config/cluster_spec.h"
#include "config/limits.h"
#include "config/model_spec.h"
#include "kernels/step.h"

namespace expertd {

// One matrix of one expert slot. `rank` counts this process's ranks from 0.
struct MatrixId {
  int32_t rank = 0;
  int32_t layer = 0;  // LayerSpec::layer
  int32_t slot = 0;   // 0..slots_per_rank-1
  Matrix matrix = Matrix::kGate;
};

// Memory to read one matrix into, in the file's layout: codes [out, in/2] (low nibble = even K),
// scale bytes [out, in/group].
struct MatrixBuffers {
  absl::Span<uint8_t> codes;
  absl::Span<uint8_t> scales;
};

// Takes the canonical matrices of a checkpoint; packing is the backend's business. Block scales
// were checked by the loader: none is NaN, and an MXFP4 block outside 2^-100..2^60 is zero.
// Thread-safe for different MatrixIds. Each id: Reserve, fill, then Commit once. Both may block
// while a bounded staging pool is full, at most until `deadline`.
class WeightSink {
 public:
  virtual ~WeightSink() = default;

  virtual absl::StatusOr<MatrixBuffers> Reserve(const MatrixId& id, absl::Time deadline) = 0;

  // second_level: the factor applied to the matrix's accumulators; 1 for MXFP4.
  virtual absl::Status Commit(const MatrixId& id, float second_level) = 0;

  // After the last Commit: refuses with a list if any matrix of a placed expert is missing.
  virtual absl::Status Finish() = 0;
};

struct BackendOptions {
  std::vector<LayerSpec> layers;  // ascending by layer, not empty
  std::shared_ptr<const Placement> placement;
  int32_t max_tokens_per_rank = 0;  // T
  int32_t num_threads = 0;          // CPU: all ranks together; 0 = one a core
  std::vector<int32_t> devices;     // CUDA: one rank a device; empty = the first visible ones
  // A step that takes longer fails and the next one runs; below the limit at which the caller gives
  // the backend up.
  absl::Duration step_timeout = absl::Milliseconds(limits::kStepTimeoutMs);
  DType partials = DType::kF32;  // CUDA, several ranks: partial rows on their way home
};

struct BackendInfo {
  std::string name;                  // "cpu", "cuda"
  std::vector<std::string> devices;  // [ranks] what each rank runs on, for people
  int32_t num_ranks = 0;             // of this process
  int32_t max_tokens_per_rank = 0;
  int64_t weight_bytes = 0;     // held, all ranks
  int64_t workspace_bytes = 0;  // allocated beside the weights, all ranks
  std::string detail;           // e.g. the instruction set in use
};

struct StepResult {
  absl::Status status;  // not OK: nothing of the outputs may be answered; see kernels/fatal.h
  StepTiming timing;
};

// Input and output memory of one step, per local rank sized for max_tokens_per_rank rows of F32 and
// kMaxTopK ids. Owned by the backend; valid between AcquireStep and ReleaseStep.
struct StepMemory {
  std::vector<RankBatch> ranks;  // pointers set, num_tokens 0
};

// What computes. Created whole or not at all; every method but AbortSteps is called by one thread
// (the engine's), the sink's by the loader's threads before the first step.
class Backend {
 public:
  using Done = std::function<void(StepResult)>;

  virtual ~Backend() = default;  // waits for submitted steps

  virtual const BackendInfo& info() const = 0;
  virtual WeightSink& sink() = 0;

  // One of limits::kStepMemories; RESOURCE_EXHAUSTED if none becomes free before `deadline`.
  virtual absl::StatusOr<StepMemory*> AcquireStep(absl::Time deadline) = 0;
  virtual void ReleaseStep(StepMemory* memory) = 0;  // any thread

  // Runs the step; at most limits::kStepsInFlight not done. `done` is called once, from a thread of
  // the backend, in submission order, and must not block. A wrong argument is an error here,
  // without a call.
  virtual absl::Status Submit(const MoeStep& step, Done done) = 0;

  // Any thread: what runs or is staged ends soon with `reason`; later submissions fail with it.
  virtual void AbortSteps(const absl::Status& reason) = 0;
};

// The plain CPU backend; its ranks are groups of threads that exchange rows.
absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const BackendOptions& options);

}  // namespace expertd
