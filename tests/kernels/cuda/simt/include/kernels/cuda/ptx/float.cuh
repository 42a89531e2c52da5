#pragma once

#include <cmath>

// Stands in for kernels/cuda/ptx/float.cuh.
namespace expertd::cuda::ptx {

inline float min_nan(float a, float b) { return std::isnan(a) || a < b ? a : b; }
inline float max_nan(float a, float b) { return std::isnan(a) || a > b ? a : b; }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float rcp_approx(float x) { return 1.0f / x; }

}  // namespace expertd::cuda::ptx
