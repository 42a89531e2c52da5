#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "config/model_spec.h"
#include "kernels/reference/reference.h"

// Random layers and batches on the host, for tests that compare a GPU with the double reference.
// The same seed gives the same case everywhere.
namespace expertd::testing {

// The matrices of a layer in file layout, expert after expert.
struct HostLayer {
  LayerSpec spec;
  std::vector<uint8_t> codes[kNumMatrices];   // [E, out, in/2]
  std::vector<uint8_t> scales[kNumMatrices];  // [E, out, in/group]
  std::vector<float> second_level;            // [E, kNumMatrices], 1 for MXFP4

  reference::MatrixView View(int32_t expert, Matrix matrix) const;
  std::vector<reference::ExpertView> Experts() const;
};

// Weights of such a size that outputs are near 1; block scales vary by a factor of 8 around it,
// some blocks are zero (codes +0 and -0, any scale byte). NVFP4: unequal second levels for gate and
// up.
HostLayer MakeRandomLayer(const LayerSpec& spec, uint64_t seed);

enum class Routing {
  kUniform,    // K different experts where E >= K
  kSkewed,     // the lower an expert's number, the likelier; duplicates happen
  kOneExpert,  // every route to expert E - 1
  kMasked,     // about half of the ids -1, some rows all -1; masked weights are NaN
  kAllMasked,
};
std::string RoutingName(Routing routing);

// One step's input; hidden states are BF16 bits with mean square 1.
struct HostBatch {
  int32_t num_tokens = 0;
  int32_t top_k = 0;
  std::vector<uint16_t> hidden;         // [T, H]
  std::vector<int32_t> ids;             // [T, K]
  std::vector<float> weights;           // [T, K], about 1/sqrt(K), both signs
  std::vector<int32_t> row_in_request;  // [T]
};

HostBatch MakeRandomBatch(const LayerSpec& spec, int32_t num_tokens, int32_t top_k, Routing routing,
                          uint64_t seed);

// Rows `rows` of the batch as a batch of their own.
HostBatch SelectRows(const HostBatch& batch, int64_t hidden_size, absl::Span<const int32_t> rows);

// The double reference for every row of the batch: [T, H].
std::vector<double> ReferenceRows(const HostLayer& layer, const HostBatch& batch);

// At most `count` rows spread over 0..num_tokens-1, first and last included.
std::vector<int32_t> SpreadRows(int32_t num_tokens, int32_t count);

// Index of the first element that differs, -1 if none: for vectors too long to print.
template <typename T>
int64_t FirstDifference(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return 0;
  const auto [at, unused] = std::mismatch(a.begin(), a.end(), b.begin());
  return at == a.end() ? -1 : at - a.begin();
}

}  // namespace expertd::testing
