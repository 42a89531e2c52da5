#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "loader/checkpoint.h"
#include "loader/load_plan.h"
#include "loader/problems.h"

namespace expertd {

struct InspectOptions {
  CheckpointOptions checkpoint;
  int32_t num_ranks = 1;
  int32_t rank = -1;    // look at this rank's share only; -1 = at all
  bool verify = false;  // also read block scales and second levels
};

struct BackendVerdict {
  std::string backend;       // "cpu", "cuda"
  std::string architecture;  // "any", "sm_90a"
  bool can_serve = false;
  std::string reason;  // why not
};

// What --verify read of one layer. Values, not bytes.
struct LayerScales {
  int32_t layer = 0;
  int64_t blocks = 0;
  int64_t zero_blocks =
      0;  // MXFP4: zero blocks with a scale out of range; NVFP4: scales that are 0
  double smallest_scale = 0, largest_scale = 0;    // of the other blocks
  double smallest_second = 0, largest_second = 0;  // NVFP4
  double smallest_input = 0, largest_input = 0;    // NVFP4 input_scale: reported, never used
  int64_t input_scales = 0;
};

struct InspectReport {
  std::filesystem::path dir;
  Checkpoint checkpoint;
  Problems problems;
  std::vector<RankShare> ranks;          // empty if headers and config have problems
  std::vector<BackendVerdict> backends;  // empty if there are problems: none can serve it
  bool verified = false;
  std::vector<LayerScales> scales;

  // Without a problem the CPU backend can serve whatever Checkpoint::Open accepts.
  bool CanBeServed() const { return problems.empty(); }
};

// Reads config and headers (and, to verify, scales), changes nothing.
InspectReport Inspect(const std::filesystem::path& dir, const InspectOptions& options);

std::string InspectText(const InspectReport& report);  // for people
std::string InspectJson(const InspectReport& report);  // one document

}  // namespace expertd
