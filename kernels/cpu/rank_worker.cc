#include "kernels/cpu/rank_worker.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "config/check.h"
#include "config/limits.h"
#include "kernels/formats.h"

namespace expertd::cpu {
namespace {

constexpr int64_t kSumColumns = 1024;  // of an output row in one work item

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

RankWorker::Workspace::Workspace(const Config& config) : scratch(config.num_threads) {
  const int32_t num_ranks = config.limits.num_ranks;
  group_rows = int64_t{num_ranks} * config.limits.MaxRowsPerHome();
  group_routes = int64_t{num_ranks} * config.limits.MaxRoutesPerHome();
  if (num_ranks == 1) return;
  const int64_t row_bytes = config.max_hidden_size * int64_t{sizeof(float)};
  message_bytes = int64_t{sizeof(DispatchHeader)} + config.limits.MaxRowsPerHome() * row_bytes +
                  config.limits.MaxRoutesPerHome() * int64_t{sizeof(Route)};
  message_bytes = CeilDiv(message_bytes, 64) * 64;
  answer_bytes = config.limits.MaxRoutesPerHome() * row_bytes;
}

size_t RankWorker::Workspace::Place(const Config& config, uint8_t* base) {
  Carver carver(base);
  const int64_t num_ranks = config.limits.num_ranks;
  x = carver.Take<float>(group_rows * (config.max_hidden_size + kRowPadding));
  h = carver.Take<float>(group_routes * (config.max_intermediate_size + kRowPadding));
  y = carver.Take<float>(group_routes * config.max_hidden_size);
  send = carver.Take<uint8_t>(num_ranks * message_bytes);
  receive = carver.Take<uint8_t>(num_ranks * message_bytes);
  answers = carver.Take<uint8_t>(num_ranks * answer_bytes);
  for (ThreadScratch& thread : scratch) {
    thread.gemm = carver.Take<float>(kGemmScratchFloats);
    thread.first = carver.Take<float>(kItemTokens * kItemRows);
    thread.second = carver.Take<float>(kItemTokens * kItemRows);
    thread.x = carver.Take<const float*>(kItemTokens);
  }
  return carver.used();
}

int64_t RankWorker::WorkspaceBytes(const Config& config) {
  return static_cast<int64_t>(Workspace(config).Place(config, nullptr));
}

RankWorker::RankWorker(const Config& config)
    : config_(config),
      threads_(config.num_threads, config.spin),
      home_(config.limits, *config.placement),
      owned_(config.limits, config.placement->slots_per_rank()),
      work_(config) {
  const int32_t num_ranks = config.limits.num_ranks;
  row_source_.reserve(work_.group_rows);
  first_route_.resize(num_ranks + 1);
  active_.reserve(config.placement->slots_per_rank());
  sending_.resize(num_ranks);
  receiving_.resize(num_ranks);
  received_.resize(num_ranks);
}

absl::StatusOr<std::unique_ptr<RankWorker>> RankWorker::Create(const Config& config) {
  auto memory =
      MappedMemory::Create(static_cast<size_t>(WorkspaceBytes(config)), "the workspace of a rank");
  if (!memory.ok()) return memory.status();
  auto worker = std::unique_ptr<RankWorker>(new RankWorker(config));
  worker->memory_ = *std::move(memory);
  worker->work_.Place(config, worker->memory_.data());
  return worker;
}

absl::Status RankWorker::Check(const MoeStep& step, const char* phase) const {
  if (limit_->aborted->load(std::memory_order_relaxed)) return absl::AbortedError("aborted");
  if (absl::Now() <= limit_->deadline) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("step ", step.step, " layer ", step.layer,
                                                  ": rank ", config_.rank,
                                                  " reached the step's deadline in ", phase));
}

absl::Status RankWorker::Run(const MoeStep& step, int32_t layer_index, const StepLimit& limit) {
  spec_ = &config_.weights->layers()[layer_index];
  layer_index_ = layer_index;
  limit_ = &limit;
  const int32_t tokens = step.ranks[config_.local_rank].num_tokens;
  auto num_rounds =
      static_cast<int32_t>(CeilDiv(tokens, config_.limits.TokensPerRound(step.top_k)));
  num_rounds = std::max(num_rounds, 1);  // every rank joins the first
  for (int32_t round = 0; round < num_rounds; ++round) {
    if (absl::Status status = RunRound(step, round, &num_rounds); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RankWorker::RunRound(const MoeStep& step, int32_t round, int32_t* num_rounds) {
  const RankBatch& batch = step.ranks[config_.local_rank];
  const int32_t round_tokens = config_.limits.TokensPerRound(step.top_k);
  const auto begin =
      static_cast<int32_t>(std::min<int64_t>(int64_t{round} * round_tokens, batch.num_tokens));
  const int32_t end = std::min(batch.num_tokens, begin + round_tokens);
  home_.Build(batch, begin, end, step.top_k);

  if (config_.limits.num_ranks > 1) {
    BuildMessages(step, *num_rounds);
    const ExchangeTag tag{step.generation, step.step, round, ExchangePhase::kDispatch};
    absl::Status status = config_.exchange->AllToAll(config_.rank, tag, sending_, receiving_,
                                                     absl::MakeSpan(received_), limit_->deadline);
    if (!status.ok()) return status;
  }
  if (absl::Status status = ReadMessages(step, num_rounds); !status.ok()) return status;

  ConvertRows(step);
  FirstLayer();
  if (absl::Status status = Check(step, "FC1"); !status.ok()) return status;
  SecondLayer();
  if (absl::Status status = Check(step, "FC2"); !status.ok()) return status;
  if (absl::Status status = Combine(step, round); !status.ok()) return status;
  SumRows(step, begin, end);
  return Check(step, "combine");
}

void RankWorker::BuildMessages(const MoeStep& step, int32_t num_rounds) {
  const int64_t row_bytes = spec_->hidden_size * DTypeBytes(step.input_dtype);
  const auto* hidden = static_cast<const uint8_t*>(step.ranks[config_.local_rank].hidden);
  for (int32_t rank = 0; rank < config_.limits.num_ranks; ++rank) {
    receiving_[rank] = {work_.receive + rank * work_.message_bytes,
                        static_cast<size_t>(work_.message_bytes)};
    if (rank == config_.rank) continue;
    const auto rows = home_.RowsTo(rank);
    const auto routes = home_.RoutesTo(rank);
    const DispatchHeader header{num_rounds, static_cast<int32_t>(rows.size()),
                                static_cast<int32_t>(routes.size()),
                                static_cast<int32_t>(row_bytes)};
    uint8_t* const message = work_.send + rank * work_.message_bytes;
    uint8_t* at = message;
    std::memcpy(at, &header, sizeof(header));
    at += sizeof(header);
    for (const int32_t token : rows) {
      std::memcpy(at, hidden + token * row_bytes, row_bytes);
      at += row_bytes;
    }
    if (!routes.empty()) std::memcpy(at, routes.data(), routes.size() * sizeof(Route));
    at += routes.size() * sizeof(Route);
    sending_[rank] = {message, static_cast<size_t>(at - message)};
  }
}

// Rank by rank, this rank's own tokens in their turn: they never leave their memory.
absl::Status RankWorker::ReadMessages(const MoeStep& step, int32_t* num_rounds) {
  const int64_t row_bytes = spec_->hidden_size * DTypeBytes(step.input_dtype);
  row_source_.clear();
  owned_.Clear();
  for (int32_t rank = 0; rank < config_.limits.num_ranks; ++rank) {
    first_route_[rank] = owned_.num_routes();
    const auto first_row = static_cast<int32_t>(row_source_.size());
    if (rank == config_.rank) {
      const auto* hidden = static_cast<const uint8_t*>(step.ranks[config_.local_rank].hidden);
      const auto rows = home_.RowsTo(rank);
      for (const int32_t token : rows) row_source_.push_back(hidden + token * row_bytes);
      EXPERTD_CHECK(
          owned_.Add(home_.RoutesTo(rank), static_cast<int32_t>(rows.size()), first_row).ok());
      continue;
    }
    const uint8_t* message = receiving_[rank].data();
    DispatchHeader header;
    if (received_[rank] >= sizeof(header)) std::memcpy(&header, message, sizeof(header));
    const bool plausible =
        received_[rank] >= sizeof(header) && header.num_rows >= 0 && header.num_routes >= 0 &&
        header.num_rounds >= 1 && header.num_rounds <= config_.limits.max_tokens &&
        header.num_rows <= config_.limits.MaxRowsPerHome() && header.row_bytes == row_bytes &&
        received_[rank] == sizeof(header) + header.num_rows * row_bytes +
                               static_cast<size_t>(header.num_routes) * sizeof(Route);
    if (!plausible) {
      return absl::DataLossError(absl::StrCat("step ", step.step, " layer ", step.layer, ": rank ",
                                              config_.rank, " cannot read the message of rank ",
                                              rank, " (", received_[rank], " bytes)"));
    }
    message += sizeof(header);
    for (int32_t row = 0; row < header.num_rows; ++row) {
      row_source_.push_back(message + row * row_bytes);
    }
    // Rows are a multiple of 64 bytes, so the routes behind them are aligned.
    const auto* routes = reinterpret_cast<const Route*>(message + header.num_rows * row_bytes);
    absl::Status status =
        owned_.Add({routes, static_cast<size_t>(header.num_routes)}, header.num_rows, first_row);
    if (!status.ok()) return status;
    *num_rounds = std::max(*num_rounds, header.num_rounds);
  }
  first_route_[config_.limits.num_ranks] = owned_.num_routes();
  owned_.GroupBySlot();
  return absl::OkStatus();
}

void RankWorker::ConvertRows(const MoeStep& step) {
  const int64_t hidden_size = spec_->hidden_size;
  threads_.Run(static_cast<int64_t>(row_source_.size()), [&](int64_t row, int) {
    float* x = work_.x + row * (hidden_size + kRowPadding);
    if (step.input_dtype == DType::kF32) {
      std::memcpy(x, row_source_[row], hidden_size * sizeof(float));
      return;
    }
    const auto* from = reinterpret_cast<const uint16_t*>(row_source_[row]);
    for (int64_t i = 0; i < hidden_size; ++i) x[i] = Bf16ToFloat(from[i]);
  });
}

// Work items: for each slot with routes, blocks of rows times blocks of routes. Routes vary
// fastest, so that neighbours share weights in the cache.
int64_t RankWorker::ListItems(int64_t num_matrix_rows) {
  active_.clear();
  int64_t num_items = 0;
  for (int32_t slot = 0; slot < config_.placement->slots_per_rank(); ++slot) {
    const auto entries = static_cast<int64_t>(owned_.OfSlot(slot).size());
    if (entries == 0) continue;
    active_.push_back({slot, num_items});
    num_items += CeilDiv(num_matrix_rows, kItemRows) * CeilDiv(entries, kItemTokens);
  }
  return num_items;
}

RankWorker::Item RankWorker::ItemAt(int64_t index, int64_t num_matrix_rows) const {
  const auto next = std::upper_bound(active_.begin(), active_.end(), index,
                                     [](int64_t i, const Active& a) { return i < a.first_item; });
  const Active& active = *(next - 1);
  const auto entries = owned_.OfSlot(active.slot);
  const int64_t token_blocks = CeilDiv(static_cast<int64_t>(entries.size()), kItemTokens);
  const int64_t within = index - active.first_item;
  const int64_t row_begin = within / token_blocks * kItemRows;
  return {active.slot, row_begin, std::min(row_begin + kItemRows, num_matrix_rows),
          entries.subspan(within % token_blocks * kItemTokens, kItemTokens)};
}

void RankWorker::FirstLayer() {
  const int64_t rows = spec_->intermediate_size;
  const int64_t x_stride = spec_->hidden_size + kRowPadding;
  const int64_t h_stride = spec_->intermediate_size + kRowPadding;
  threads_.Run(ListItems(rows), [&](int64_t index, int thread) {
    if (limit_->Reached()) return;
    const ThreadScratch& scratch = work_.scratch[thread];
    const Item item = ItemAt(index, rows);
    for (size_t n = 0; n < item.entries.size(); ++n) {
      scratch.x[n] = work_.x + item.entries[n].row * x_stride;
    }
    GemmTask task;
    task.row_begin = item.row_begin;
    task.row_end = item.row_end;
    task.x = scratch.x;
    task.num_tokens = static_cast<int64_t>(item.entries.size());
    task.out_stride = kItemRows;
    task.scratch = scratch.gemm;
    task.matrix = config_.weights->Get(config_.local_rank, layer_index_, item.slot, Matrix::kGate);
    task.out = scratch.first;
    Fp4Gemm(task);
    task.matrix = config_.weights->Get(config_.local_rank, layer_index_, item.slot, Matrix::kUp);
    task.out = scratch.second;
    Fp4Gemm(task);
    for (size_t n = 0; n < item.entries.size(); ++n) {
      SwiGlu(scratch.first + n * kItemRows, scratch.second + n * kItemRows, spec_->swiglu_limit,
             item.row_end - item.row_begin,
             work_.h + item.entries[n].route * h_stride + item.row_begin);
    }
  });
}

void RankWorker::SecondLayer() {
  const int64_t rows = spec_->hidden_size;
  const int64_t h_stride = spec_->intermediate_size + kRowPadding;
  threads_.Run(ListItems(rows), [&](int64_t index, int thread) {
    if (limit_->Reached()) return;
    const ThreadScratch& scratch = work_.scratch[thread];
    const Item item = ItemAt(index, rows);
    for (size_t n = 0; n < item.entries.size(); ++n) {
      scratch.x[n] = work_.h + item.entries[n].route * h_stride;
    }
    GemmTask task;
    task.matrix = config_.weights->Get(config_.local_rank, layer_index_, item.slot, Matrix::kDown);
    task.row_begin = item.row_begin;
    task.row_end = item.row_end;
    task.x = scratch.x;
    task.num_tokens = static_cast<int64_t>(item.entries.size());
    task.out = scratch.first;
    task.out_stride = kItemRows;
    task.scratch = scratch.gemm;
    Fp4Gemm(task);
    for (size_t n = 0; n < item.entries.size(); ++n) {
      std::memcpy(work_.y + item.entries[n].route * rows + item.row_begin,
                  scratch.first + n * kItemRows, (item.row_end - item.row_begin) * sizeof(float));
    }
  });
}

absl::Status RankWorker::Combine(const MoeStep& step, int32_t round) {
  if (config_.limits.num_ranks == 1) return absl::OkStatus();
  const int64_t row_bytes = spec_->hidden_size * int64_t{sizeof(float)};
  for (int32_t rank = 0; rank < config_.limits.num_ranks; ++rank) {
    const int64_t routes = first_route_[rank + 1] - first_route_[rank];
    sending_[rank] = {reinterpret_cast<const uint8_t*>(work_.y) + first_route_[rank] * row_bytes,
                      static_cast<size_t>(routes * row_bytes)};
    receiving_[rank] = {work_.answers + rank * work_.answer_bytes,
                        static_cast<size_t>(work_.answer_bytes)};
  }
  const ExchangeTag tag{step.generation, step.step, round, ExchangePhase::kCombine};
  absl::Status status = config_.exchange->AllToAll(config_.rank, tag, sending_, receiving_,
                                                   absl::MakeSpan(received_), limit_->deadline);
  if (!status.ok()) return status;
  for (int32_t rank = 0; rank < config_.limits.num_ranks; ++rank) {
    const size_t expected = home_.RoutesTo(rank).size() * row_bytes;
    if (rank != config_.rank && received_[rank] != expected) {
      return absl::DataLossError(
          absl::StrCat("step ", step.step, " layer ", step.layer, ": rank ", rank, " returned ",
                       received_[rank], " bytes to rank ", config_.rank, ", expected ", expected));
    }
  }
  return absl::OkStatus();
}

const float* RankWorker::AnswerRow(HomeRouting::Owner owner) const {
  if (owner.rank == config_.rank) {
    return work_.y + (first_route_[owner.rank] + owner.position) * spec_->hidden_size;
  }
  return reinterpret_cast<const float*>(work_.answers + owner.rank * work_.answer_bytes) +
         owner.position * spec_->hidden_size;
}

// In k order whatever rank computed a row: the bits do not depend on R.
void RankWorker::SumRows(const MoeStep& step, int32_t begin, int32_t end) {
  const RankBatch& batch = step.ranks[config_.local_rank];
  const int64_t hidden_size = spec_->hidden_size;
  const int64_t blocks = CeilDiv(hidden_size, kSumColumns);
  threads_.Run((end - begin) * blocks, [&](int64_t index, int) {
    const auto i = static_cast<int32_t>(index / blocks);
    const int64_t column = index % blocks * kSumColumns;
    const int64_t count = std::min(kSumColumns, hidden_size - column);
    float sum[kSumColumns] = {};
    for (int32_t k = 0; k < step.top_k; ++k) {
      const HomeRouting::Owner owner = home_.OwnerOf(i, k);
      if (owner.rank < 0) continue;
      const float weight = batch.weights[static_cast<size_t>(begin + i) * step.top_k + k];
      const float* y = AnswerRow(owner) + column;
      for (int64_t c = 0; c < count; ++c) sum[c] += weight * y[c];
    }
    const int64_t at = (begin + i) * hidden_size + column;
    if (step.output_dtype == DType::kF32) {
      std::memcpy(static_cast<float*>(batch.output) + at, sum, count * sizeof(float));
      return;
    }
    auto* out = static_cast<uint16_t*>(batch.output) + at;
    for (int64_t c = 0; c < count; ++c) out[c] = FloatToBf16(sum[c]);
  });
}

}  // namespace expertd::cpu
