#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "config/model_spec.h"

namespace expertd {

// The bytes of one random FP4 matrix: a pure function of its arguments, row by row, the same on
// every machine. One hash gives eight bytes.
class RandomMatrix {
 public:
  // expert and matrix select independent content; layer counts mtp layers after the others.
  RandomMatrix(uint64_t seed, int32_t layer, int32_t expert, Matrix matrix, MatrixShape shape,
               Recipe recipe, bool power_of_two_scales);

  void FillCodes(int64_t row, absl::Span<uint8_t> codes) const;    // [in/2]
  void FillScales(int64_t row, absl::Span<uint8_t> scales) const;  // [in/group]
  float second_level() const { return second_level_; }             // 1 for MXFP4

 private:
  // Eight blocks' dice, one a byte; the same dice decide scales and zero blocks.
  uint64_t Dice(int64_t row, int64_t block_of_eight) const;
  bool IsLargeRow(int64_t row) const;  // 16 times the others: meets the clamp
  void ChooseMagnitude(uint64_t expert_key);

  uint64_t key_;
  Matrix matrix_;
  MatrixShape shape_;
  Recipe recipe_;
  bool power_of_two_scales_;
  uint8_t base_scale_ = 0;  // smallest ordinary scale byte
  float second_level_ = 1;
};

// Eight pseudo-random bytes of (key, index).
uint64_t RandomWord(uint64_t key, uint64_t index);

}  // namespace expertd
