#pragma once

#include <cstdint>
#include <vector>

#include "loader/checkpoint.h"
#include "loader/inspect.h"
#include "loader/problems.h"

namespace expertd {

// Reads every block scale, second level and input scale of these experts, one matrix in memory at a
// time, and the codes of a matrix only where its scales need them. Adds what LoadWeights would
// refuse.
std::vector<LayerScales> VerifyScales(const Checkpoint& checkpoint,
                                      const std::vector<int32_t>& experts, Problems* problems);

}  // namespace expertd
