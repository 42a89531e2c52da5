#pragma once

#include <cstdint>
#include <vector>

#include "config/dtype.h"

namespace expertd {

// One rank's rows of a step: non-owning views of memory that a Backend handed out with AcquireStep.
// The engine fills the inputs, the backend the output. Row-major, little-endian, nothing padded.
struct RankBatch {
  int32_t num_tokens = 0;    // T, 0..max_tokens_per_rank; 0 rows are a normal step
  void* hidden = nullptr;    // [T, H], MoeStep::input_dtype
  int32_t* ids = nullptr;    // [T, K] expert, or -1 = masked: not dispatched, weight ignored
  float* weights = nullptr;  // [T, K] final: never normalised or scaled here
  int32_t* row_in_request = nullptr;  // [T] index within the request: chooses among replicas
  void* output = nullptr;             // [T, H], MoeStep::output_dtype; every element is written
};

// One layer x one batch over the ranks that this process owns. All ranks of the group run the same
// sequence of (generation, step, layer), with zero rows where they have none.
struct MoeStep {
  uint64_t generation = 0;
  uint64_t step = 0;  // without gaps within a generation, from 0
  int32_t layer = 0;
  int32_t top_k =
      0;  // K of the id rows here, 1..limits::kMaxTopK; shorter requests are padded with -1
  DType input_dtype = DType::kBf16;
  DType output_dtype = DType::kBf16;
  std::vector<RankBatch> ranks;  // [local ranks]
};

// Where the time of a step went, microseconds. 0 where a backend has no such phase.
struct StepTiming {
  int64_t copy_in_us = 0;
  int64_t kernel_us = 0;
  int64_t copy_out_us = 0;
};

}  // namespace expertd
