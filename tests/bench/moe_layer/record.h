#pragma once

#include <string>

#include "tests/bench/moe_layer/measure.h"

namespace expertd::bench {

// What holds for all rows of a run.
struct RunFacts {
  std::string gpu;
  std::string commit;
  double read_ceiling = 0;   // GB/s
  double vendor_tflops = 0;  // 0: no library
};

// One line for people.
void Print(const RunFacts& facts, const LayerGroup& group, const Row& row, const Row* single);

// One JSON object a line, appended to `path`. `single`: the same T on one GPU in the same run, null
// for one rank.
void Append(const std::string& path, const RunFacts& facts, const LayerGroup& group, const Row& row,
            const Row* single);

}  // namespace expertd::bench
