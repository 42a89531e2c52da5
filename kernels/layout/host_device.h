#pragma once

// Functions of the layouts are written once and called from both sides.
#if defined(__CUDACC__)
#define EXPERTD_HD __host__ __device__ __forceinline__
#else
#define EXPERTD_HD inline
#endif
