#pragma once

namespace expertd::bench {

// What this machine can do at best right now with `num_threads` threads.
struct Ceilings {
  double read_gb_per_s = 0;    // streaming read of a buffer far larger than the last-level cache
  double fma_gflop_per_s = 0;  // f32 fused multiply-adds on registers, 2 FLOPs each
};

// `seconds` for each of the two; the best of several passes counts.
Ceilings MeasureCeilings(int num_threads, double seconds, bool small_buffer);

}  // namespace expertd::bench
