#pragma once

#include "tests/gpu/testing/rank_site.h"

namespace expertd::testing {

// RankSite::Open for RankMode::kDeviceEach; at least `num_ranks` devices are there.
absl::StatusOr<std::unique_ptr<RankSite>> OpenDeviceEach(int num_ranks, int64_t workspace_bytes);

}  // namespace expertd::testing
