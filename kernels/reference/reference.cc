#include "kernels/reference/reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "config/check.h"
#include "kernels/formats.h"

namespace expertd::reference {
namespace {

double DecodeScale(Recipe recipe, uint8_t byte) {
  return recipe == Recipe::kMxfp4 ? DecodeUe8m0(byte) : DecodeE4m3(byte);
}

// What every byte of a file means, so that decoding a row is two look-ups.
struct DecodeTables {
  std::array<std::array<double, 2>, 256> code_pairs;  // the even K element first
  std::array<double, 256> scales;
};

DecodeTables MakeTables(Recipe recipe) {
  DecodeTables tables;
  for (int byte = 0; byte < 256; ++byte) {
    tables.code_pairs[byte] = {kE2m1Values[byte & 15], kE2m1Values[byte >> 4]};
    tables.scales[byte] = DecodeScale(recipe, static_cast<uint8_t>(byte));
  }
  return tables;
}

const DecodeTables& TablesFor(Recipe recipe) {
  static const DecodeTables mxfp4 = MakeTables(Recipe::kMxfp4);
  static const DecodeTables nvfp4 = MakeTables(Recipe::kNvfp4);
  return recipe == Recipe::kMxfp4 ? mxfp4 : nvfp4;
}

void CheckSizes(const MatrixView& matrix, Recipe recipe, MatrixShape shape) {
  EXPERTD_CHECK(static_cast<int64_t>(matrix.codes.size()) == shape.CodeBytes());
  EXPERTD_CHECK(static_cast<int64_t>(matrix.scales.size()) == shape.ScaleBytes(recipe));
}

// e2m1 * block scale of one row, without the second level: exact in double. values [in].
void DecodeRow(const MatrixView& matrix, Recipe recipe, MatrixShape shape, int64_t row,
               absl::Span<double> values) {
  const DecodeTables& tables = TablesFor(recipe);
  const int64_t group = ScaleGroup(recipe);
  const uint8_t* codes = matrix.codes.data() + row * (shape.in / 2);
  const uint8_t* scales = matrix.scales.data() + row * (shape.in / group);
  for (int64_t block = 0; block < shape.in / group; ++block) {
    const double scale = tables.scales[scales[block]];
    for (int64_t col = block * group; col < (block + 1) * group; col += 2) {
      const std::array<double, 2> pair = tables.code_pairs[codes[col / 2]];
      values[col] = pair[0] * scale;
      values[col + 1] = pair[1] * scale;
    }
  }
}

// Eight partial sums: the order is fixed, and the compiler may keep them in vector registers.
double Dot(const double* a, const double* b, int64_t count) {
  constexpr int64_t kLanes = 8;
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < count; ++i) sums[i % kLanes] += a[i] * b[i];
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

// out[n] = second level * W in[n] for the vectors in[n] [shape.in] -> out[n] [shape.out]. Each row
// is decoded once for all vectors.
void Multiply(const MatrixView& matrix, Recipe recipe, MatrixShape shape,
              absl::Span<const double* const> in, absl::Span<double* const> out) {
  CheckSizes(matrix, recipe, shape);
  std::vector<double> row_values(shape.in);
  for (int64_t row = 0; row < shape.out; ++row) {
    DecodeRow(matrix, recipe, shape, row, absl::MakeSpan(row_values));
    for (size_t n = 0; n < in.size(); ++n) {
      out[n][row] = Dot(row_values.data(), in[n], shape.in) * matrix.second_level;
    }
  }
}

double Activate(double gate, double up, double limit) {
  if (limit > 0) {
    gate = std::min(gate, limit);
    up = std::clamp(up, -limit, limit);
  }
  return gate / (1 + std::exp(-gate)) * up;
}

std::vector<double*> RowPointers(std::vector<double>& rows, int64_t row_size, size_t num_rows) {
  std::vector<double*> pointers;
  for (size_t n = 0; n < num_rows; ++n) pointers.push_back(rows.data() + n * row_size);
  return pointers;
}

// y[n] [H] = W2 (silu(W1 x[n]) * W3 x[n]), clamped, for every row x[n] [H] that was routed here.
void RunExpert(const LayerSpec& spec, const ExpertView& expert, absl::Span<const double* const> x,
               absl::Span<double* const> y) {
  const auto multiply = [&](Matrix which, absl::Span<const double* const> in,
                            absl::Span<double* const> out) {
    Multiply(expert.matrices[static_cast<int>(which)], spec.recipe, ShapeOf(spec, which), in, out);
  };
  const int64_t intermediate = spec.intermediate_size;
  std::vector<double> gate(x.size() * intermediate);
  std::vector<double> up(x.size() * intermediate);
  const std::vector<double*> gate_rows = RowPointers(gate, intermediate, x.size());
  multiply(Matrix::kGate, x, gate_rows);
  multiply(Matrix::kUp, x, RowPointers(up, intermediate, x.size()));
  for (size_t i = 0; i < gate.size(); ++i) {
    gate[i] = Activate(gate[i], up[i], spec.swiglu_limit);
  }
  multiply(Matrix::kDown, std::vector<const double*>(gate_rows.begin(), gate_rows.end()), y);
}

}  // namespace

double Dequantise(const MatrixView& matrix, Recipe recipe, MatrixShape shape, int64_t row,
                  int64_t col) {
  CheckSizes(matrix, recipe, shape);
  EXPERTD_CHECK(0 <= row && row < shape.out && 0 <= col && col < shape.in);
  const int64_t group = ScaleGroup(recipe);
  const uint8_t pair = matrix.codes[row * (shape.in / 2) + col / 2];
  const uint8_t code = col % 2 == 0 ? pair & 15 : pair >> 4;
  return kE2m1Values[code] *
         DecodeScale(recipe, matrix.scales[row * (shape.in / group) + col / group]) *
         matrix.second_level;
}

std::vector<double> Forward(const LayerSpec& spec, absl::Span<const ExpertView> experts,
                            absl::Span<const double> hidden, absl::Span<const int32_t> ids,
                            absl::Span<const float> weights, int32_t top_k) {
  const size_t hidden_size = spec.hidden_size;
  const size_t num_tokens = hidden.size() / hidden_size;
  EXPERTD_CHECK(hidden.size() == num_tokens * hidden_size);
  EXPERTD_CHECK(ids.size() == num_tokens * top_k && weights.size() == ids.size());

  std::vector<std::vector<size_t>> routes_of_expert(experts.size());  // indices into ids
  size_t num_routes = 0;
  for (size_t route = 0; route < ids.size(); ++route) {
    if (ids[route] == -1) continue;
    EXPERTD_CHECK(0 <= ids[route] && static_cast<size_t>(ids[route]) < experts.size());
    routes_of_expert[ids[route]].push_back(route);
    ++num_routes;
  }

  std::vector<double> y(num_routes * hidden_size);  // [routes, H], expert by expert
  std::vector<double*> y_of_route(ids.size(), nullptr);
  double* next = y.data();
  for (size_t expert = 0; expert < experts.size(); ++expert) {
    std::vector<const double*> x_rows;
    std::vector<double*> y_rows;
    for (const size_t route : routes_of_expert[expert]) {
      x_rows.push_back(hidden.data() + route / top_k * hidden_size);
      y_rows.push_back(y_of_route[route] = next);
      next += hidden_size;
    }
    if (!x_rows.empty()) RunExpert(spec, experts[expert], x_rows, absl::MakeSpan(y_rows));
  }

  std::vector<double> out(num_tokens * hidden_size, 0.0);
  for (size_t route = 0; route < ids.size(); ++route) {  // in k order within a token
    if (y_of_route[route] == nullptr) continue;
    double* row = out.data() + route / top_k * hidden_size;
    for (size_t i = 0; i < hidden_size; ++i) row[i] += weights[route] * y_of_route[route][i];
  }
  return out;
}

double RelL2(absl::Span<const float> actual, absl::Span<const double> expected) {
  EXPERTD_CHECK(actual.size() == expected.size());
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double got = actual[i];
    if (std::isnan(got) && std::isnan(expected[i])) continue;
    if (got == expected[i]) {  // also equal infinities, whose difference is NaN
      if (std::isfinite(got)) norm += expected[i] * expected[i];
      continue;
    }
    if (!std::isfinite(got) || !std::isfinite(expected[i])) {
      return std::numeric_limits<double>::infinity();
    }
    error += (got - expected[i]) * (got - expected[i]);
    norm += expected[i] * expected[i];
  }
  if (error == 0) return 0;
  return std::sqrt(error / norm);  // norm 0: infinity
}

}  // namespace expertd::reference
