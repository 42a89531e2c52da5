#pragma once

#include <cstdint>

#include "kernels/layout/host_device.h"

namespace expertd::cuda::moe_layer {

// Divides by a number that is known before the launch: a multiplication and a shift, exact for
// everything below 2^31. The host finds the multiplier.
class Divisor {
 public:
  constexpr Divisor() = default;  // by one
  explicit constexpr Divisor(uint32_t divisor) {
    int bits = 0;
    while (uint64_t{1} << bits < divisor) ++bits;
    shift_ = 31 + bits;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor - 1) / divisor);
  }

  EXPERTD_HD uint32_t Quotient(uint32_t number) const {
    return static_cast<uint32_t>(uint64_t{number} * multiplier_ >> shift_);
  }

 private:
  uint32_t multiplier_ = 0x80000000u;
  int32_t shift_ = 31;
};

}  // namespace expertd::cuda::moe_layer
