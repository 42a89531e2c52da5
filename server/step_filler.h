#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/step.h"
#include "server/copy_pool.h"
#include "server/request.h"

namespace expertd {

// Rows of one call that lie together on one rank.
struct Placed {
  int32_t rank = 0;
  int64_t first_row = 0;  // on the rank
  int64_t count = 0;
};

// A step ready to submit and where each call's rows went, in row order.
struct FilledStep {
  MoeStep step;
  std::vector<std::vector<Placed>> placed;  // [calls]
  int64_t rows = 0;                         // all calls together
};

// Copies the calls' rows into `memory`, spread evenly and in order over its ranks. Which rank a row
// gets depends on its neighbours and its answer does not: ranks only choose where partial sums are
// added, and replicas are chosen by the row's index within its own request. The calls share one key
// and fit into ranks x max_tokens_per_rank rows. `copies` moves the rows.
FilledStep FillStep(const BatchKey& key, const std::vector<std::shared_ptr<Call>>& calls,
                    const StepMemory& memory, int32_t max_tokens_per_rank, CopyPool& copies);

}  // namespace expertd
