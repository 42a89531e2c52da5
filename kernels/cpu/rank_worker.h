#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/cpu/exchange.h"
#include "kernels/cpu/fp4_gemm.h"
#include "kernels/cpu/mapped_memory.h"
#include "kernels/cpu/routing.h"
#include "kernels/cpu/thread_group.h"
#include "kernels/cpu/weight_store.h"

namespace expertd::cpu {

// When a step has to end: at its deadline or when somebody aborts.
struct StepLimit {
  absl::Time deadline = absl::InfiniteFuture();
  const std::atomic<bool>* aborted = nullptr;

  bool Reached() const {
    return aborted->load(std::memory_order_relaxed) || absl::Now() > deadline;
  }
};

// One rank of a step, phase by phase: it dispatches its tokens, computes the routes that reach its
// experts, returns their rows and sums what comes back. All memory is allocated at creation. Used
// by one thread, the rank's own; the phases spread over the rank's ThreadGroup.
class RankWorker {
 public:
  struct Config {
    int32_t rank = 0;        // in the group
    int32_t local_rank = 0;  // in this process: index into the weights and MoeStep::ranks
    int32_t num_threads = 1;
    bool spin = true;
    RoundLimits limits;
    int64_t max_hidden_size = 0;  // over the layers
    int64_t max_intermediate_size = 0;
    const Placement* placement = nullptr;
    const WeightStore* weights = nullptr;
    Exchange* exchange = nullptr;
  };

  static absl::StatusOr<std::unique_ptr<RankWorker>> Create(const Config& config);

  // What Create will map; needs no weights, placement or exchange.
  static int64_t WorkspaceBytes(const Config& config);

  // A failure names the rank and the phase, and who waited for whom.
  absl::Status Run(const MoeStep& step, int32_t layer_index, const StepLimit& limit);

  int64_t workspace_bytes() const { return static_cast<int64_t>(memory_.size()); }

 private:
  static constexpr int64_t kItemRows = 64;     // rows of a matrix in one work item
  static constexpr int64_t kItemTokens = 128;  // routes of a slot in one work item
  static constexpr int64_t kRowPadding = 16;   // floats: rows a power of two apart share cache sets

  struct ThreadScratch {
    float* gemm;   // [kGemmScratchFloats]
    float* first;  // [kItemTokens, kItemRows]
    float* second;
    const float** x;  // [kItemTokens]
  };
  // One block of memory, sized for the worst routing.
  struct Workspace {
    explicit Workspace(const Config& config);
    size_t Place(const Config& config, uint8_t* base);  // returns the bytes; null: only counts

    int64_t group_rows = 0;
    int64_t group_routes = 0;
    int64_t message_bytes = 0;  // largest dispatch message; 0 where R = 1
    int64_t answer_bytes = 0;   // largest combine message

    float* x = nullptr;                  // [group rows, H + kRowPadding]
    float* h = nullptr;                  // [group routes, I + kRowPadding]
    float* y = nullptr;                  // [group routes, H], in order of arrival
    uint8_t* send = nullptr;             // [R, message_bytes]
    uint8_t* receive = nullptr;          // [R, message_bytes]
    uint8_t* answers = nullptr;          // [R, answer_bytes]
    std::vector<ThreadScratch> scratch;  // [num_threads]
  };
  struct Active {  // a slot with routes
    int32_t slot;
    int64_t first_item;
  };
  struct Item {
    int32_t slot;
    int64_t row_begin, row_end;
    absl::Span<const OwnerRouting::Entry> entries;
  };

  explicit RankWorker(const Config& config);

  absl::Status RunRound(const MoeStep& step, int32_t round, int32_t* num_rounds);
  void BuildMessages(const MoeStep& step, int32_t num_rounds);
  absl::Status ReadMessages(const MoeStep& step, int32_t* num_rounds);
  void ConvertRows(const MoeStep& step);
  int64_t ListItems(int64_t num_matrix_rows);
  Item ItemAt(int64_t index, int64_t num_matrix_rows) const;
  void FirstLayer();
  void SecondLayer();
  absl::Status Combine(const MoeStep& step, int32_t round);
  void SumRows(const MoeStep& step, int32_t begin, int32_t end);
  const float* AnswerRow(HomeRouting::Owner owner) const;
  absl::Status Check(const MoeStep& step, const char* phase) const;

  Config config_;
  ThreadGroup threads_;
  HomeRouting home_;
  OwnerRouting owned_;
  MappedMemory memory_;
  Workspace work_;  // pieces of memory_

  // Of the step and round that run.
  const LayerSpec* spec_ = nullptr;
  int32_t layer_index_ = 0;
  const StepLimit* limit_ = nullptr;
  std::vector<const uint8_t*> row_source_;  // [rows] in the input dtype
  std::vector<int64_t> first_route_;        // [R + 1] arrival index of each home rank's routes
  std::vector<Active> active_;
  std::vector<absl::Span<const uint8_t>> sending_;
  std::vector<absl::Span<uint8_t>> receiving_;
  std::vector<size_t> received_;
};

}  // namespace expertd::cpu
