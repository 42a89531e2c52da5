#include "kernels/formats.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace expertd {
namespace {

TEST(FormatsTest, E2m1HasTheEightMagnitudesAndASignBit) {
  const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) {
    EXPECT_EQ(kE2m1Values[code], magnitudes[code]);
    EXPECT_EQ(kE2m1Values[code + 8], -magnitudes[code]);
    EXPECT_TRUE(std::signbit(kE2m1Values[code + 8]));
  }
}

TEST(FormatsTest, Ue8m0IsAPowerOfTwoBelow255) {
  for (int byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(DecodeUe8m0(static_cast<uint8_t>(byte)), std::pow(2.0, byte - 127)) << byte;
  }
  EXPECT_TRUE(std::isnan(DecodeUe8m0(255)));
}

TEST(FormatsTest, E4m3HasSubnormalsReaches448AndHasNoInfinity) {
  EXPECT_EQ(DecodeE4m3(0x00), 0.0f);
  EXPECT_EQ(DecodeE4m3(0x01), std::ldexp(1.0f, -9));
  EXPECT_EQ(DecodeE4m3(0x07), std::ldexp(7.0f, -9));
  EXPECT_EQ(DecodeE4m3(0x08), std::ldexp(1.0f, -6));
  EXPECT_EQ(DecodeE4m3(0x38), 1.0f);
  EXPECT_EQ(DecodeE4m3(0x3c), 1.5f);
  EXPECT_EQ(DecodeE4m3(0x7e), 448.0f);
  EXPECT_EQ(DecodeE4m3(0xfe), -448.0f);
  EXPECT_TRUE(std::isnan(DecodeE4m3(0x7f)));
  EXPECT_TRUE(std::isnan(DecodeE4m3(0xff)));
  for (int byte = 1; byte < 0x7f; ++byte) {  // ascending
    EXPECT_GT(DecodeE4m3(static_cast<uint8_t>(byte)), DecodeE4m3(static_cast<uint8_t>(byte - 1)));
  }
}

TEST(FormatsTest, Bf16RoundsToNearestEven) {
  EXPECT_EQ(FloatToBf16(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // tie to even
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // tie to even
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);  // to infinity
  EXPECT_EQ(FloatToBf16(-0.0f), 0x8000);
}

TEST(FormatsTest, Bf16KeepsInfinityAndNan) {
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::infinity()), 0x7f80);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(FormatsTest, EveryBf16ValueSurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto bf16 = static_cast<uint16_t>(bits);
    if (std::isnan(Bf16ToFloat(bf16))) continue;
    ASSERT_EQ(FloatToBf16(Bf16ToFloat(bf16)), bf16);
  }
}

}  // namespace
}  // namespace expertd
