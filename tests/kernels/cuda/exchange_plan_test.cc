#include "kernels/cuda/exchange_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "config/limits.h"

namespace expertd::cuda {
namespace {

using ::testing::HasSubstr;

ExchangeShape SmallShape() {
  return {.num_ranks = 4,
          .max_tokens_per_rank = 100,
          .max_top_k = 8,
          .slots_per_rank = 6,
          .hidden_size = 192,
          .intermediate_size = 128};
}

ExchangeHeader Header(int32_t rows, int32_t top_k = 4, int32_t tokens = 50) {
  return {.step = 9, .layer = 3, .tokens = tokens, .top_k = top_k, .rows = rows};
}

// headers[from][to], as every rank tells every rank, itself too.
std::vector<std::vector<ExchangeHeader>> RandomHeaders(int ranks, uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  std::vector<std::vector<ExchangeHeader>> headers(ranks);
  for (auto& row : headers) {
    const int32_t top_k = 1 + below(8);
    const int32_t tokens = below(3) == 0 ? 0 : 1 + below(100);
    for (int to = 0; to < ranks; ++to) {
      row.push_back(Header(below(4) == 0 ? 0 : below(tokens + 1), top_k, tokens));
    }
  }
  return headers;
}

std::vector<ExchangeHeader> Received(const std::vector<std::vector<ExchangeHeader>>& headers,
                                     int rank) {
  std::vector<ExchangeHeader> received;
  for (const auto& row : headers) received.push_back(row[rank]);
  return received;
}

// Blocks given as [begin, end): none overlaps another and together they fill [0, total).
void ExpectTheyFill(std::vector<std::pair<int64_t, int64_t>> blocks, int64_t total) {
  std::sort(blocks.begin(), blocks.end());
  int64_t end = 0;
  for (const auto& [first, last] : blocks) {
    EXPECT_EQ(first, end);
    end = last;
  }
  EXPECT_EQ(end, total);
}

TEST(ExchangePlanTest, BlocksFillTheirArraysWithoutGapOrOverlap) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const int ranks = 1 + static_cast<int>(seed % 7);
    const auto headers = RandomHeaders(ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) {
      const auto received = Received(headers, rank);
      const ExchangePlan plan = PlanExchange(rank, headers[rank], received);
      std::vector<std::pair<int64_t, int64_t>> out_rows, out_records, in_rows, in_records;
      int64_t sent_rows = 0, sent_records = 0, records = 0;
      for (int q = 0; q < ranks; ++q) {
        const BlockBegin in = plan.incoming[q];
        in_rows.emplace_back(in.row, in.row + received[q].rows);
        in_records.emplace_back(in.record, in.record + RecordsOf(received[q]));
        records += RecordsOf(received[q]);
        if (q == rank) continue;
        const BlockBegin out = plan.outgoing[q];
        out_rows.emplace_back(out.row, out.row + headers[rank][q].rows);
        out_records.emplace_back(out.record, out.record + RecordsOf(headers[rank][q]));
        sent_rows += headers[rank][q].rows;
        sent_records += RecordsOf(headers[rank][q]);
      }
      ExpectTheyFill(out_rows, sent_rows);
      ExpectTheyFill(out_records, sent_records);
      ExpectTheyFill(in_rows, plan.rows);
      ExpectTheyFill(in_records, records);
    }
  }
}

TEST(ExchangePlanTest, OwnRowsComeFirstWhateverThePeersSend) {
  const auto headers = RandomHeaders(5, 3);
  for (int rank = 0; rank < 5; ++rank) {
    const ExchangePlan plan = PlanExchange(rank, headers[rank], Received(headers, rank));
    EXPECT_EQ(plan.incoming[rank].row, 0);
    EXPECT_EQ(plan.incoming[rank].record, 0);
  }
}

TEST(ExchangePlanTest, KIsTheLargestOfThoseThatSendRowsAndTokensAreThoseOfAll) {
  const std::vector<ExchangeHeader> sent(3, Header(5, 4, 20));
  const std::vector<ExchangeHeader> received = {Header(5, 4, 20), Header(0, 8, 30),
                                                Header(7, 6, 10)};
  const ExchangePlan plan = PlanExchange(0, sent, received);
  EXPECT_EQ(plan.top_k, 6);
  EXPECT_EQ(plan.rows, 12);
  EXPECT_EQ(plan.group_tokens, 60);
  const std::vector<ExchangeHeader> nothing(3, Header(0, 4, 0));
  EXPECT_EQ(PlanExchange(1, nothing, nothing).rows, 0);
}

// Whatever a rank may send or get, at the maximum of everything, fits its array.
TEST(ExchangePlanTest, TheArraysHoldTheWorstRouting) {
  for (const bool bf16 : {false, true}) {
    ExchangeShape shape = SmallShape();
    shape.partials_bf16 = bf16;
    const ExchangeLayout layout = PlanExchangeLayout(shape);
    const int64_t rows = int64_t{4} * 100;
    const int64_t row_bytes = bf16 ? 192 * 2 : 192 * 4;
    // Every token to all three peers.
    EXPECT_GE(layout.peer_routes - layout.peer_rows, 300 * 192 * 2);
    EXPECT_GE(layout.peer_routes - layout.peer_rows, 300 * row_bytes);
    EXPECT_GE(layout.rows - layout.peer_routes, (300 * 8 + 4) * 8);
    EXPECT_GE(layout.routes - layout.rows, rows * 192 * 2);
    EXPECT_GE(layout.ids - layout.routes, (rows * 8 + 4) * 8);
    EXPECT_GE(layout.weights - layout.ids, rows * 8 * 4);
    EXPECT_GE(layout.partials - layout.weights, rows * 8 * 4);
    EXPECT_GE(layout.tag - layout.partials, rows * row_bytes);
    EXPECT_GE(layout.bytes - layout.workspace,
              layout::PlanWorkspace(LocalWorkspaceShape(shape)).bytes);
    for (const int64_t offset :
         {layout.received, layout.positions, layout.peer_rows, layout.peer_routes, layout.rows,
          layout.routes, layout.ids, layout.weights, layout.partials, layout.tag, layout.peer_tags,
          layout.first_slot, layout.slots, layout.workspace}) {
      EXPECT_EQ(offset % 256, 0);
    }
  }
}

TEST(ExchangePlanTest, SeveralRanksPayForNcclsBuffersToo) {
  ExchangeShape shape = SmallShape();
  EXPECT_EQ(ExchangeDeviceBytes(shape),
            PlanExchangeLayout(shape).bytes + limits::kNcclExchangeBytes);
  shape.num_ranks = 1;
  EXPECT_EQ(ExchangeDeviceBytes(shape), PlanExchangeLayout(shape).bytes);
}

TEST(ExchangePlanTest, OneRankRoundsNothing) {
  ExchangeShape shape = SmallShape();
  shape.partials_bf16 = true;
  EXPECT_EQ(shape.partial_row_bytes(), 192 * 2);
  shape.num_ranks = 1;
  EXPECT_EQ(shape.partial_row_bytes(), 192 * 4);
}

// A token goes to a peer once, so K = 1 sends one row a token at most.
TEST(ExchangePlanTest, OutgoingRowsAreBoundedByRoutesAndByPeers) {
  ExchangeShape shape = SmallShape();
  EXPECT_EQ(shape.outgoing_rows(), 300);
  shape.max_top_k = 2;
  EXPECT_EQ(shape.outgoing_rows(), 200);
  shape.num_ranks = 1;
  EXPECT_EQ(shape.outgoing_rows(), 0);
}

TEST(ExchangePlanTest, ShapesBeyondALimitAreRefusedByName) {
  EXPECT_TRUE(CheckExchangeShape(SmallShape()).ok());
  const auto message = [](auto change) {
    ExchangeShape shape = SmallShape();
    change(shape);
    const absl::Status status = CheckExchangeShape(shape);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message([](auto& s) { s.num_ranks = 65; }), HasSubstr("ranks: found 65"));
  EXPECT_THAT(message([](auto& s) { s.max_tokens_per_rank = 0; }),
              HasSubstr("max_tokens_per_rank"));
  EXPECT_THAT(message([](auto& s) { s.max_top_k = 33; }), HasSubstr("top_k: found 33"));
  EXPECT_THAT(message([](auto& s) { s.slots_per_rank = 0; }), HasSubstr("slots_per_rank"));
  EXPECT_THAT(message([](auto& s) {
                s.num_ranks = 64;
                s.max_tokens_per_rank = limits::kMaxTokensPerRank;
                s.max_top_k = limits::kMaxTopK;
                s.intermediate_size = 2048;
              }),
              HasSubstr("all routes of all ranks"));
}

TEST(ExchangePlanTest, ARankInAnotherStepOrLayerIsNamed) {
  std::vector<ExchangeHeader> received(3, Header(5));
  EXPECT_TRUE(CheckHeaders(SmallShape(), 0, received).ok());
  received[2].step = 10;
  EXPECT_THAT(std::string(CheckHeaders(SmallShape(), 0, received).message()),
              HasSubstr("rank 0 is in step 9 layer 3, rank 2 in step 10 layer 3"));
  received[2] = Header(5);
  received[1].layer = 4;
  EXPECT_THAT(std::string(CheckHeaders(SmallShape(), 0, received).message()),
              HasSubstr("rank 1 in step 9 layer 4"));
}

TEST(ExchangePlanTest, ARankThatSendsMoreThanTheBuffersHoldIsNamed) {
  for (const ExchangeHeader& wrong : {Header(101, 4, 101), Header(51, 4, 50), Header(-1, 4, 50),
                                      Header(5, 9, 50), Header(5, 0, 50)}) {
    std::vector<ExchangeHeader> received(3, Header(5));
    received[1] = wrong;
    EXPECT_THAT(std::string(CheckHeaders(SmallShape(), 0, received).message()),
                HasSubstr("rank 1 sends"));
  }
}

TEST(ExchangePlanTest, RanksThatDidNotAnswerAreListed) {
  std::vector<ExchangeTag> tags(4, {.step = 7, .fault = 0});
  EXPECT_EQ(RanksMissing(0, 7, tags), "");
  tags[0].step = 1;  // itself does not count
  EXPECT_EQ(RanksMissing(0, 7, tags), "");
  tags[2].step = 6;
  EXPECT_EQ(RanksMissing(0, 7, tags), "rank 2");
  tags[3].step = 6;
  EXPECT_EQ(RanksMissing(0, 7, tags), "ranks 2, 3");
}

}  // namespace
}  // namespace expertd::cuda
