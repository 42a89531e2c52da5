#include "loader/checkpoint_content.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "config/check.h"

namespace expertd {
namespace {

static_assert(std::endian::native == std::endian::little, "words are stored as they are in memory");

// Dice below kZeroDice make a zero block, the next ones a tiny scale (NVFP4).
constexpr uint64_t kZeroDice = 4;
constexpr uint64_t kTinyDice = 8;
constexpr int kLargeRowPeriod = 64;
constexpr int kLargeRowBinades = 4;
constexpr uint64_t kSignBits = 0x8888888888888888u;

// Root mean square of the 16 codes when all are equally likely: sqrt(68.5 / 8).
constexpr double kCodeRms = 2.926174977679906;
// Of the four MXFP4 scales 2^-2 .. 2^1 that a block draws from: sqrt((1/16 + 1/4 + 1 + 4) / 4).
constexpr double kMxScaleRms = 1.152443057161611;

// Mixes a word so that any change of input changes about half of the bits (the finaliser of
// splitmix64).
uint64_t Mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

// Root mean square of the 32 E4M3 values that begin at `first_byte` (normal numbers).
double E4m3Rms(int first_byte) {
  double sum = 0;
  for (int byte = first_byte; byte < first_byte + 32; ++byte) {
    const double value = std::ldexp(8 + (byte & 7), (byte >> 3) - 10);
    sum += value * value;  // exact: few significand bits
  }
  return std::sqrt(sum / 32);
}

// Exponent of the power of two nearest to value by ratio.
int NearestBinade(double value) { return std::ilogb(value * std::sqrt(2.0)); }

}  // namespace

uint64_t RandomWord(uint64_t key, uint64_t index) {
  return Mix(key + (index + 1) * 0x9e3779b97f4a7c15u);
}

RandomMatrix::RandomMatrix(uint64_t seed, int32_t layer, int32_t expert, Matrix matrix,
                           MatrixShape shape, Recipe recipe, bool power_of_two_scales)
    : matrix_(matrix), shape_(shape), recipe_(recipe), power_of_two_scales_(power_of_two_scales) {
  const uint64_t expert_key = RandomWord(
      RandomWord(RandomWord(0, seed), static_cast<uint64_t>(layer)), static_cast<uint64_t>(expert));
  key_ = RandomWord(expert_key, static_cast<uint64_t>(matrix));
  ChooseMagnitude(expert_key);
}

void RandomMatrix::ChooseMagnitude(uint64_t expert_key) {
  const double weight_rms = 1 / std::sqrt(static_cast<double>(shape_.in));
  if (recipe_ == Recipe::kMxfp4) {
    base_scale_ =
        static_cast<uint8_t>(127 - 2 + NearestBinade(weight_rms / kCodeRms / kMxScaleRms));
    return;
  }
  // The three matrices of an expert begin in different binades: unequal second levels.
  const uint64_t first = RandomWord(expert_key, kNumMatrices);
  const int exponent = 4 + static_cast<int>((first % 4 + static_cast<uint64_t>(matrix_)) % 4);
  base_scale_ = static_cast<uint8_t>(8 * exponent);
  double second_level = weight_rms / kCodeRms / E4m3Rms(base_scale_);
  if (power_of_two_scales_) {
    second_level = std::ldexp(1.0, NearestBinade(second_level));
  } else {
    second_level *= 0.75 + 0.5 * static_cast<double>(key_ >> 32) / 4294967296.0;
  }
  second_level_ = static_cast<float>(second_level);
}

uint64_t RandomMatrix::Dice(int64_t row, int64_t block_of_eight) const {
  return RandomWord(Mix(key_ ^ static_cast<uint64_t>(2 * row + 1)),
                    static_cast<uint64_t>(block_of_eight));
}

bool RandomMatrix::IsLargeRow(int64_t row) const {
  if (matrix_ == Matrix::kDown) return false;
  return row % kLargeRowPeriod == (matrix_ == Matrix::kGate ? 5 : 23);
}

void RandomMatrix::FillScales(int64_t row, absl::Span<uint8_t> scales) const {
  EXPERTD_CHECK(static_cast<int64_t>(scales.size()) == shape_.in / ScaleGroup(recipe_));
  const int large = IsLargeRow(row) ? kLargeRowBinades : 0;
  uint64_t dice = 0;
  for (size_t block = 0; block < scales.size(); ++block, dice >>= 8) {
    if (block % 8 == 0) dice = Dice(row, static_cast<int64_t>(block / 8));
    const uint64_t die = dice & 255;
    if (die < kZeroDice) {
      scales[block] = 0;
    } else if (recipe_ == Recipe::kMxfp4) {
      scales[block] = static_cast<uint8_t>(base_scale_ + (die & 3) + large);
    } else if (die < kTinyDice) {
      scales[block] = static_cast<uint8_t>(power_of_two_scales_ ? 1u << (die % 3) : 1 + die % 7);
    } else {
      const uint64_t step = power_of_two_scales_ ? (die >> 3) & ~uint64_t{7} : die >> 3;
      scales[block] = static_cast<uint8_t>(base_scale_ + step + 8 * large);
    }
  }
}

void RandomMatrix::FillCodes(int64_t row, absl::Span<uint8_t> codes) const {
  EXPERTD_CHECK(static_cast<int64_t>(codes.size()) == shape_.in / 2);
  const uint64_t row_key = Mix(key_ ^ static_cast<uint64_t>(2 * row + 2));
  const size_t words_per_block = static_cast<size_t>(ScaleGroup(recipe_)) / 16;
  const size_t num_words = codes.size() / 8;
  uint64_t dice = 0;
  for (size_t word_idx = 0; word_idx < num_words; ++word_idx) {
    if (word_idx % (8 * words_per_block) == 0) {
      dice = Dice(row, static_cast<int64_t>(word_idx / words_per_block / 8));
    } else if (word_idx % words_per_block == 0) {
      dice >>= 8;
    }
    uint64_t word = RandomWord(row_key, word_idx);
    if ((dice & 255) < kZeroDice) word &= kSignBits;  // +0 and -0
    std::memcpy(codes.data() + 8 * word_idx, &word, 8);
  }
}

}  // namespace expertd
