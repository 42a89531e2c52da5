#include "loader/scale_check.h"

#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace expertd {
namespace {

constexpr MatrixShape kShape = {.out = 3, .in = 64};

TEST(ScaleCheckTest, EveryUe8m0ByteIsJudgedByTheWrittenRange) {
  for (int byte = 0; byte < 256; ++byte) {
    std::vector<uint8_t> codes(3 * 32, 0x11), scales(3 * 2, 127);
    scales[3] = static_cast<uint8_t>(byte);
    const auto bad = FindBadBlockScale(Recipe::kMxfp4, kShape, codes, scales);
    EXPECT_EQ(!bad.has_value(), byte >= 127 - 100 && byte <= 127 + 60) << byte;
    EXPECT_EQ(bad.value_or("block scale [1, 1]: found").find("block scale [1, 1]: found"), 0u);
    std::fill_n(codes.begin() + 3 * 16, 16, 0x80);  // a zero block: -0 and +0
    EXPECT_EQ(!FindBadBlockScale(Recipe::kMxfp4, kShape, codes, scales).has_value(), byte != 255);
  }
}

TEST(ScaleCheckTest, OneCodeThatIsNotZeroMakesABlockCount) {
  for (int position = 0; position < 16; ++position) {
    for (const uint8_t code : {0x01, 0x10, 0x90, 0x0f}) {
      std::vector<uint8_t> codes(3 * 32, 0), scales(3 * 2, 0);
      codes[static_cast<size_t>(5 * 16 + position)] = code;
      EXPECT_TRUE(FindBadBlockScale(Recipe::kMxfp4, kShape, codes, scales).has_value());
    }
  }
}

TEST(ScaleCheckTest, OnlyNanE4m3BytesAreRefused) {
  for (int byte = 0; byte < 256; ++byte) {
    std::vector<uint8_t> scales(3 * 4, 0x38);
    scales[11] = static_cast<uint8_t>(byte);
    const bool good = byte != 0x7f && byte != 0xff;
    EXPECT_EQ(BlockScalesPlain(Recipe::kNvfp4, scales), good) << byte;
    const auto bad = FindBadBlockScale(Recipe::kNvfp4, kShape, {}, scales);
    EXPECT_EQ(!bad.has_value(), good) << byte;
    EXPECT_EQ(bad.value_or("block scale [2, 3]: found NaN").find("block scale [2, 3]: found NaN"),
              0u);
  }
}

TEST(ScaleCheckTest, SecondLevelMustBeFiniteAndAboveZero) {
  EXPECT_FALSE(FindBadSecondLevel(1e-30f).has_value());
  EXPECT_FALSE(FindBadSecondLevel(std::numeric_limits<float>::max()).has_value());
  EXPECT_FALSE(FindBadSecondLevel(std::numeric_limits<float>::denorm_min()).has_value());
  for (const float bad :
       {0.0f, -0.0f, -1.0f, std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_TRUE(FindBadSecondLevel(bad).has_value()) << bad;
  }
}

}  // namespace
}  // namespace expertd
