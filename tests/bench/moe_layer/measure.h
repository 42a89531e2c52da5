#pragma once

#include <string>

#include "kernels/cuda/kernel_config.h"
#include "tests/bench/moe_layer/layer_group.h"

namespace expertd::bench {

// What is known about steps of T tokens on a group. Times are the slowest rank's; bytes and FLOPs
// are of one rank.
struct Row {
  int tokens = 0;
  double us_median = 0, us_min = 0;   // bursts
  double us_sustained = 0;            // 0: not measured
  double mhz = 0, mhz_sustained = 0;  // of the slowest clock
  double weight_bytes = 0, flops = 0;
  double link_bytes = 0;
  double rel_err = 0;
  int64_t workspace_bytes = 0;
  cuda::KernelConfig config;
};

// The group's SetTokens has been called; these fill their part of the row.

// The output of some routings against the plain kernels in f32, sampled rows of every rank.
void Compare(LayerGroup& group, Row* row);

// Launches that each follow a read which displaces L2; all ranks meet on the GPUs before each. On a
// card that was idle for a moment. Prints the timing marks if the kernel records them.
void Burst(LayerGroup& group, Row* row);

// A second of launches back to back, the first half of it not counted.
void Sustain(LayerGroup& group, Row* row);

}  // namespace expertd::bench
