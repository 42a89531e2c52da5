#include "kernels/cpu/fp4_gemm.h"

#include <algorithm>
#include <cmath>

#include "kernels/formats.h"

namespace expertd::cpu {

void Fp4Gemm(const GemmTask& task) {
  const Fp4Matrix& m = task.matrix;
  const int64_t group = ScaleGroup(m.recipe);
  for (int64_t row = task.row_begin; row < task.row_end; ++row) {
    const uint8_t* codes = m.codes + row * (m.in / 2);
    const uint8_t* scales = m.scales + row * (m.in / group);
    for (int64_t n = 0; n < task.num_tokens; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < m.in; ++k) {
        const uint8_t byte = scales[k / group];
        const float scale = m.recipe == Recipe::kMxfp4 ? DecodeUe8m0(byte) : DecodeE4m3(byte);
        const int code = (codes[k / 2] >> (4 * (k & 1))) & 15;
        sum = std::fma(task.x[n][k], kE2m1Values[code] * scale, sum);
      }
      task.out[n * task.out_stride + row - task.row_begin] = sum * m.second_level;
    }
  }
}

void SwiGlu(const float* g, const float* u, float limit, int64_t count, float* h) {
  for (int64_t i = 0; i < count; ++i) {
    const float gate = limit > 0 && g[i] > limit ? limit : g[i];
    float up = u[i];
    if (limit > 0 && up > limit) up = limit;
    if (limit > 0 && up < -limit) up = -limit;
    h[i] = gate / (1.0f + std::exp(-gate)) * up;
  }
}

std::string InstructionSet() { return "scalar"; }

}  // namespace expertd::cpu
