#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/model_spec.h"

namespace expertd::cpu {

// A matrix [out, in] in the file's layout. `in` and `out` are multiples of
// limits::kGeometryMultiple. Up to kReadPadding bytes after the last code and the last scale may be
// read.
struct Fp4Matrix {
  const uint8_t* codes = nullptr;   // [out, in/2], low nibble = even K
  const uint8_t* scales = nullptr;  // [out, in/group]
  int64_t in = 0;
  Recipe recipe = Recipe::kMxfp4;
  float second_level = 1;
};

inline constexpr int64_t kReadPadding = 64;

// Rows of a matrix times tokens:
//   out[n * out_stride + r - row_begin] = second_level * sum over k, ascending, of fma(x[n][k],
//   w[r, k])
// One accumulator a (row, token), one K order, whatever the rows, the tokens and the instruction
// set: a result's bits depend on its own row and its own token only.
struct GemmTask {
  Fp4Matrix matrix;
  int64_t row_begin = 0;  // multiples of kRowTile
  int64_t row_end = 0;
  const float* const* x = nullptr;  // [num_tokens] each [in]
  int64_t num_tokens = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  float* scratch = nullptr;  // [kGemmScratchFloats], 64-byte aligned, one a thread
};

inline constexpr int64_t kRowTile = 32;  // rows are handed out in multiples of this
inline constexpr int64_t kDecodeColumns = 256;
inline constexpr int64_t kGemmScratchFloats = kRowTile * kDecodeColumns;

void Fp4Gemm(const GemmTask& task);

// h[i] = silu(min(g[i], limit)) * clamp(u[i], -limit, limit); limit 0 = no clamp. h may be g or u.
void SwiGlu(const float* g, const float* u, float limit, int64_t count, float* h);

// The instruction set that the calls above use on this machine, e.g. "AVX3_ZEN4".
std::string InstructionSet();

// Those compiled in that this machine has, best first.
std::vector<std::string> InstructionSets();
// Only for tests, while no step runs: use this one, or the best again if `name` is empty.
void ForceInstructionSetForTest(const std::string& name);

}  // namespace expertd::cpu
