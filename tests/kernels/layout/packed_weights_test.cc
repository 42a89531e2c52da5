#include "kernels/layout/packed_weights.h"

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/formats.h"
#include "kernels/layout/pack_host.h"

namespace expertd::layout {
namespace {

struct Source {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  CanonicalMatrix view;
};

Source RandomMatrix(WeightFormat format, int out, int in, float second_level, uint32_t seed) {
  std::mt19937 random(seed);
  Source source;
  const int group = format == WeightFormat::kMx ? 32 : 16;
  source.codes.resize(static_cast<size_t>(out) * in / 2);
  source.scales.resize(static_cast<size_t>(out) * in / group);
  for (auto& byte : source.codes) byte = static_cast<uint8_t>(random());
  for (auto& byte : source.scales) {
    byte = format == WeightFormat::kMx ? static_cast<uint8_t>(100 + random() % 40)
                                       : static_cast<uint8_t>(random() % 0x7f);
  }
  source.view = {source.codes.data(), source.scales.data(), out, in, second_level};
  return source;
}

double Truth(WeightFormat format, const CanonicalMatrix& matrix, int row, int k) {
  const uint8_t byte = matrix.codes[(static_cast<int64_t>(row) * matrix.in + k) / 2];
  const float code = kE2m1Values[k % 2 == 0 ? byte & 15 : byte >> 4];
  const int group = format == WeightFormat::kMx ? 32 : 16;
  const uint8_t scale = matrix.scales[static_cast<int64_t>(row) * (matrix.in / group) + k / group];
  const double value = format == WeightFormat::kMx ? DecodeUe8m0(scale) : DecodeE4m3(scale);
  return value * code * matrix.second_level;
}

class PackedWeights : public testing::TestWithParam<WeightFormat> {};

TEST_P(PackedWeights, EveryWeightOfEveryMatrixComesBackExactlyAndPaddingIsZero) {
  const WeightFormat format = GetParam();
  for (const auto& [intermediate, hidden] :
       {std::pair{64, 64}, {128, 192}, {192, 320}, {320, 128}}) {
    const PackedMatrix fc1{format, 2 * intermediate, hidden};
    const PackedMatrix fc2{format, hidden, intermediate};
    const auto gate = RandomMatrix(format, intermediate, hidden, 0.5f, 1);
    const auto up = RandomMatrix(format, intermediate, hidden, 4.0f, 2);
    const auto down = RandomMatrix(format, hidden, intermediate, 0.25f, 3);
    std::vector<uint8_t> units1(fc1.slot_bytes(), 0xff), units2(fc2.slot_bytes(), 0xff);
    std::vector<float> factors1(fc1.scales_per_slot(), NAN), factors2(fc2.scales_per_slot(), NAN);
    PackMatrix(fc1, Rows::kGate, gate.view, units1.data(), factors1.data());
    PackMatrix(fc1, Rows::kUp, up.view, units1.data(), factors1.data());
    PackMatrix(fc2, Rows::kAll, down.view, units2.data(), factors2.data());
    for (int row = 0; row < fc1.rows; ++row) {
      const auto& matrix = RowHalf(row) ? up.view : gate.view;
      for (int k = 0; k < fc1.num_units_k() * kUnitK; ++k) {
        const double truth = k < hidden ? Truth(format, matrix, Fc1Column(row), k) : 0;
        ASSERT_EQ(UnpackWeight(fc1, units1.data(), factors1.data(), row, k), truth)
            << "row " << row << " k " << k;
      }
    }
    for (int row = 0; row < fc2.rows; ++row) {
      for (int k = 0; k < fc2.num_units_k() * kUnitK; ++k) {
        const double truth = k < intermediate ? Truth(format, down.view, row, k) : 0;
        ASSERT_EQ(UnpackWeight(fc2, units2.data(), factors2.data(), row, k), truth)
            << "row " << row << " k " << k;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, PackedWeights,
                         testing::Values(WeightFormat::kMx, WeightFormat::kNv),
                         [](const auto& info) {
                           return info.param == WeightFormat::kMx ? "Mx" : "Nv";
                         });

TEST(PackedWeights, BlockScalesFromTheSmallestToTheLargestAdmittedAreExact) {
  const PackedMatrix packed{WeightFormat::kMx, 64, 128};
  auto source = RandomMatrix(WeightFormat::kMx, 64, 128, 1.0f, 4);
  std::vector<uint8_t> units(packed.slot_bytes());
  std::vector<float> factors(packed.scales_per_slot());
  for (int lowest : {27, 64}) {  // 2^-100 .. 2^1, and 2^-63 .. 2^60
    const int highest = lowest == 27 ? 128 : 187;
    for (size_t i = 0; i < source.scales.size(); ++i) {
      source.scales[i] = static_cast<uint8_t>(lowest + i * 7919 % (highest - lowest + 1));
    }
    PackMatrix(packed, Rows::kAll, source.view, units.data(), factors.data());
    for (int row = 0; row < 64; ++row) {
      for (int k = 0; k < 128; ++k) {
        ASSERT_EQ(UnpackWeight(packed, units.data(), factors.data(), row, k),
                  Truth(WeightFormat::kMx, source.view, row, k));
      }
    }
  }
}

TEST(PackedWeights, ABlockOfZerosIsZeroWhateverItsScaleByte) {
  const PackedMatrix packed{WeightFormat::kMx, 64, 128};
  auto source = RandomMatrix(WeightFormat::kMx, 64, 128, 1.0f, 5);
  for (auto& byte : source.codes) byte = 0x80;  // +0 and -0
  for (size_t i = 0; i < source.scales.size(); ++i) source.scales[i] = i % 2 ? 255 : 0;
  std::vector<uint8_t> units(packed.slot_bytes());
  std::vector<float> factors(packed.scales_per_slot());
  PackMatrix(packed, Rows::kAll, source.view, units.data(), factors.data());
  for (int k = 0; k < 128; ++k)
    EXPECT_EQ(UnpackWeight(packed, units.data(), factors.data(), 3, k), 0);
}

TEST(PackedWeights, UnitsTileTheSlotWithoutGapAlsoWhenTheLastGroupIsNarrow) {
  for (int tiles : {1, 2, 3, 4, 5, 45, 90}) {
    const PackedMatrix packed{WeightFormat::kNv, tiles * 64, 2880};
    std::set<int64_t> offsets;
    for (int tile = 0; tile < tiles; ++tile) {
      for (int k = 0; k < packed.num_units_k(); ++k) offsets.insert(packed.unit_offset(tile, k));
    }
    EXPECT_EQ(static_cast<int>(offsets.size()), tiles * packed.num_units_k());
    EXPECT_EQ(*offsets.begin(), 0);
    EXPECT_EQ(*offsets.rbegin(), packed.slot_bytes() - kNvUnitBytes);
    for (const int64_t offset : offsets) EXPECT_EQ(offset % kNvUnitBytes, 0);
  }
}

TEST(PackedWeights, CodeAndScaleWordsFillEachUnitExactlyOnce) {
  for (const auto format : {WeightFormat::kMx, WeightFormat::kNv}) {
    std::set<int> offsets;
    for (int half = 0; half < 2; ++half) {
      for (int thread = 0; thread < kUnitThreads; ++thread) {
        for (int i = 0; i < 4; ++i) offsets.insert(CodeWordOffset(half, thread, i));
      }
    }
    for (int row = 0; row < kTileRows; ++row) {
      for (int w = 0; w < (format == WeightFormat::kMx ? 1 : 2); ++w) {
        offsets.insert(ScaleWordOffset(format, row, w));
      }
    }
    EXPECT_EQ(static_cast<int>(offsets.size()), UnitBytes(format) / 4);
    EXPECT_EQ(*offsets.rbegin(), UnitBytes(format) - 4);
  }
}

}  // namespace
}  // namespace expertd::layout
