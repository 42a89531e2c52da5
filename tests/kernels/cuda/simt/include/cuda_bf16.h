#pragma once

#include "kernels/formats.h"

// The part of the toolkit's header that the kernels use, for the emulation.
struct __nv_bfloat162 {
  uint16_t x;
  uint16_t y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {expertd::FloatToBf16(x), expertd::FloatToBf16(y)};
}
