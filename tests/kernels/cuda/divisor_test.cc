#include "kernels/cuda/moe_layer/divisor.h"

#include <cstdint>

#include "gtest/gtest.h"

namespace expertd::cuda::moe_layer {
namespace {

TEST(Divisor, IsExactAroundEveryMultipleUpToItsLimit) {
  constexpr uint32_t kLimit = 0x7fffffffu;
  for (uint32_t divisor = 1; divisor <= 1200; ++divisor) {
    const Divisor by(divisor);
    for (uint64_t multiple = 0; multiple <= kLimit; multiple = multiple * 2 + divisor) {
      const uint32_t number = static_cast<uint32_t>(multiple / divisor * divisor);
      ASSERT_EQ(by.Quotient(number), number / divisor) << number << " by " << divisor;
      if (number > 0) {
        ASSERT_EQ(by.Quotient(number - 1), (number - 1) / divisor)
            << number - 1 << " by " << divisor;
      }
    }
    const uint32_t last = kLimit / divisor * divisor;
    ASSERT_EQ(by.Quotient(last), last / divisor);
    ASSERT_EQ(by.Quotient(last - 1), (last - 1) / divisor);
    ASSERT_EQ(by.Quotient(kLimit), kLimit / divisor);
  }
}

TEST(Divisor, DividesByOneUnlessTold) { EXPECT_EQ(Divisor().Quotient(12345), 12345u); }

}  // namespace
}  // namespace expertd::cuda::moe_layer
