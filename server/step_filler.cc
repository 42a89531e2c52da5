#include "server/step_filler.h"

#include <algorithm>

#include "config/check.h"
#include "config/limits.h"

namespace expertd {
namespace {

// Rows of one call that one thread moves.
struct Piece {
  const RequestView* view = nullptr;
  int64_t first = 0;  // row of the request
  Placed to;
};

void CopyRows(const RequestView& view, int64_t first, const Placed& placed, int32_t step_top_k,
              const RankBatch& rank) {
  char* hidden = static_cast<char*>(rank.hidden) +
                 placed.first_row * view.hidden_size * DTypeBytes(view.key.input_dtype);
  view.CopyHidden(first, placed.count, hidden);
  view.CopyRoutes(first, placed.count, step_top_k, rank.ids + placed.first_row * step_top_k,
                  rank.weights + placed.first_row * step_top_k);
  for (int64_t i = 0; i < placed.count; ++i) {
    rank.row_in_request[placed.first_row + i] = static_cast<int32_t>(first + i);
  }
}

}  // namespace

FilledStep FillStep(const BatchKey& key, const std::vector<std::shared_ptr<Call>>& calls,
                    const StepMemory& memory, int32_t max_tokens_per_rank, CopyPool& copies) {
  FilledStep filled;
  MoeStep& step = filled.step;
  step.layer = key.layer;
  step.input_dtype = key.input_dtype;
  step.output_dtype = key.output_dtype;
  step.ranks = memory.ranks;
  step.top_k = 1;
  for (const auto& call : calls) {
    filled.rows += call->view.num_tokens;
    step.top_k = std::max(step.top_k, call->view.top_k);
  }
  const int64_t num_ranks = static_cast<int64_t>(step.ranks.size());
  EXPERTD_CHECK(filled.rows <= num_ranks * max_tokens_per_rank);
  for (int64_t r = 0; r < num_ranks; ++r) {
    step.ranks[r].num_tokens =
        static_cast<int32_t>(filled.rows / num_ranks + (r < filled.rows % num_ranks ? 1 : 0));
  }

  std::vector<Piece> pieces;
  int64_t bytes = 0;
  int32_t rank = 0;
  int64_t used = 0;  // rows of `rank`
  for (const auto& call : calls) {
    std::vector<Placed>& parts = filled.placed.emplace_back();
    for (int64_t row = 0; row < call->view.num_tokens;) {
      if (used == step.ranks[rank].num_tokens) {
        ++rank;
        used = 0;
        continue;
      }
      const int64_t count =
          std::min<int64_t>(call->view.num_tokens - row, step.ranks[rank].num_tokens - used);
      parts.push_back({rank, used, count});
      const int64_t row_bytes = call->view.hidden_size * DTypeBytes(key.input_dtype);
      const int64_t at_once = std::max<int64_t>(1, limits::kCopyPieceBytes / row_bytes);
      for (int64_t done = 0; done < count; done += at_once) {
        pieces.push_back(
            {&call->view, row + done, {rank, used + done, std::min(at_once, count - done)}});
      }
      bytes += count * row_bytes;
      used += count;
      row += count;
    }
  }
  copies.Run(static_cast<int64_t>(pieces.size()), bytes, [&](int64_t i) {
    const Piece& piece = pieces[i];
    CopyRows(*piece.view, piece.first, piece.to, step.top_k, step.ranks[piece.to.rank]);
  });
  return filled;
}

}  // namespace expertd
