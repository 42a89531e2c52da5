#include "loader/scale_check.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
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

TEST(ScaleCheckTest, ABadScaleIsFoundWhereverItLies) {
  constexpr MatrixShape kOdd = {.out = 13, .in = 32 * 11};  // 143 and 286 scales: no round number
  for (const Recipe recipe : {Recipe::kMxfp4, Recipe::kNvfp4}) {
    const auto columns = static_cast<size_t>(kOdd.in / ScaleGroup(recipe));
    std::vector<uint8_t> codes(static_cast<size_t>(kOdd.CodeBytes()), 0x11);
    std::vector<uint8_t> scales(static_cast<size_t>(kOdd.ScaleBytes(recipe)), 100);
    ASSERT_FALSE(FindBadBlockScale(recipe, kOdd, codes, scales).has_value());
    for (size_t i = 0; i < scales.size(); ++i) {
      scales[i] = 255;
      const auto bad = FindBadBlockScale(recipe, kOdd, codes, scales);
      ASSERT_TRUE(bad.has_value()) << i;
      EXPECT_THAT(*bad, ::testing::StartsWith(absl::StrCat("block scale [", i / columns, ", ",
                                                           i % columns, "]: found NaN")));
      scales[i] = 100;
    }
  }
}

// Between zero blocks, whose scales may be anything, a block that is not zero is still found.
TEST(ScaleCheckTest, ZeroBlocksHideNoOther) {
  constexpr MatrixShape kLong = {.out = 1, .in = 32 * 150};
  std::vector<uint8_t> codes(150 * 16, 0x88), scales(150, 0);
  EXPECT_FALSE(FindBadBlockScale(Recipe::kMxfp4, kLong, codes, scales).has_value());
  codes[149 * 16] = 0x20;
  EXPECT_THAT(FindBadBlockScale(Recipe::kMxfp4, kLong, codes, scales).value_or("nothing"),
              ::testing::StartsWith("block scale [0, 149]: found 2^-127"));
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
