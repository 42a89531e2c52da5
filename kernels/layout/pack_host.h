#pragma once

#include <cstdint>

#include "kernels/layout/packed_weights.h"

// Packing on the host: the readable definition that the GPU packing and the tests are compared
// with.
namespace expertd::layout {

// Which rows of the packed matrix a canonical matrix [out, in] fills.
enum class Rows {
  kGate,  // half 0 of an FC1 matrix
  kUp,    // half 1 of an FC1 matrix
  kAll,   // an FC2 matrix
};

EXPERTD_HD constexpr int PackedRow(Rows rows, int out_row) {
  return rows == Rows::kAll ? out_row : Fc1Row(out_row, rows == Rows::kUp ? 1 : 0);
}

// A matrix as it is in a checkpoint: codes [out, in/2] (low nibble = even K), scale bytes [out,
// in/group].
struct CanonicalMatrix {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  int out = 0;
  int in = 0;
  float second_level = 1;
};

// Writes this matrix's rows of a slot: units [packed.slot_bytes()], factors
// [packed.scales_per_slot()]. The rest of a slot that another matrix fills stays as it is.
void PackMatrix(const PackedMatrix& packed, Rows rows, const CanonicalMatrix& matrix,
                uint8_t* units, float* factors);

// The weight at (packed row, k) as the kernel's arithmetic sees it: dequantised BF16 product x
// factor. k may lie in the padding of the last unit.
double UnpackWeight(const PackedMatrix& packed, const uint8_t* units, const float* factors, int row,
                    int k);

}  // namespace expertd::layout
