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
// for one rank. Times are the slowest rank's; bytes, GB/s and TFLOP/s are one rank's. Null is what
// was not measured. With several ranks there are also:
// - exchange: "lsa" (remote stores inside the kernel) or "host" (NCCL around it)
// - partials: "f32" or "bf16", how partial rows cross
// - link_bytes: what a rank sends in a step, rows once per destination and partial rows back
// - link_gb_per_s: link_bytes over us_median
// - us_single, us_single_sustained: of the same T on one GPU in the same run
void Append(const std::string& path, const RunFacts& facts, const LayerGroup& group, const Row& row,
            const Row* single);

}  // namespace expertd::bench
