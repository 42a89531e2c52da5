#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "config/model_spec.h"

// The truth every backend is compared with: what a layer computes, in double, by plain loops.
namespace expertd::reference {

// One matrix in file form; views only.
struct MatrixView {
  absl::Span<const uint8_t> codes;   // [out, in/2]
  absl::Span<const uint8_t> scales;  // [out, in/group]
  double second_level = 1;
};

struct ExpertView {
  MatrixView matrices[kNumMatrices];  // indexed by Matrix
};

// Dequantised value of element (row, col): e2m1 * block scale * second level.
double Dequantise(const MatrixView& matrix, Recipe recipe, MatrixShape shape, int64_t row,
                  int64_t col);

// out[t] = sum over k of weights[t, k] * W2 (silu(min(W1 x, L)) * clamp(W3 x, -L, L)), in k order.
// hidden [T, H]; ids, weights [T, K], id -1 contributes nothing (its weight is not read);
// experts: [E], only those that ids name need matrices. Returns [T, H].
std::vector<double> Forward(const LayerSpec& spec, absl::Span<const ExpertView> experts,
                            absl::Span<const double> hidden, absl::Span<const int32_t> ids,
                            absl::Span<const float> weights, int32_t top_k);

// ||actual - expected|| / ||expected||; 0 / 0 is 0, NaN in only one of them is infinity.
double RelL2(absl::Span<const float> actual, absl::Span<const double> expected);

}  // namespace expertd::reference
