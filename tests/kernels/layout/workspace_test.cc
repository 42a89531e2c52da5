#include "kernels/layout/workspace.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "config/limits.h"
#include "gtest/gtest.h"

// Regions, blocks and flags of a workspace for as many ranks as exchange rows inside the kernel.
namespace expertd::layout {
namespace {

constexpr int kRanks[] = {1, 2, 3, 8, 32};

// V4-Pro with its experts spread over the ranks.
WorkspaceShape ProShape(int num_ranks, int tokens) {
  return {.num_ranks = num_ranks,
          .max_tokens_per_rank = tokens,
          .max_top_k = 6,
          .num_slots = (384 + num_ranks - 1) / num_ranks,
          .hidden = 7168,
          .intermediate = 3072};
}

struct Region {
  const char* name;
  int64_t begin;
  int64_t bytes;  // what is put there
};

// What each region has to hold, from the comments of WorkspaceOffsets.
std::vector<Region> Regions(const WorkspaceShape& shape) {
  const WorkspaceOffsets o = PlanWorkspace(shape);
  const int64_t peers = shape.num_ranks - 1;
  // One rank reads its rows where they are.
  const int64_t row_ranks = peers > 0 ? shape.num_ranks : 0;
  const int64_t tokens = shape.max_tokens_per_rank;
  const int64_t pairs = tokens * shape.max_top_k;
  const int64_t all_pairs = pairs * shape.num_ranks;
  const int64_t tiles = shape.max_token_tiles();
  const int64_t entries = all_pairs + kMaxCtas * o.own_routes;
  const int64_t fc1_stride = DoneStride(2 * shape.intermediate);
  const int64_t fc2_stride = DoneStride(shape.hidden);
  return {{"head", o.head, int64_t{sizeof(WorkspaceHead)}},
          {"route_records", o.route_records, 2 * peers * (1 + pairs) * 16},
          {"token_flags", o.token_flags, 2 * row_ranks * tokens * 4},
          {"tokens", o.tokens, 2 * row_ranks * tokens * shape.hidden * 2},
          {"partial_records", o.partial_records,
           peers * tokens * NumPartialSlices(shape.hidden) * 3 * 512},
          {"routes", o.routes, entries * 4},
          {"route_slots", o.route_slots, entries * 2},
          {"sort_counts", o.sort_counts, int64_t{kMaxCtas} * shape.num_slots * 4},
          {"fc1_done", o.fc1_done, tiles * fc1_stride * 4},
          {"fc2_done", o.fc2_done, tiles * fc2_stride * 4},
          {"sort_flags", o.sort_flags, 2 * kMaxCtas * 4},
          {"h", o.h, all_pairs * shape.intermediate * 2},
          {"y", o.y, all_pairs * shape.hidden * 2},
          {"end", o.bytes, 0}};
}

TEST(Workspace, RegionsOfManyRanksDoNotOverlap) {
  for (const int num_ranks : kRanks) {
    for (const int tokens : {1, 7, 1024, 8192}) {
      const std::vector<Region> regions = Regions(ProShape(num_ranks, tokens));
      for (size_t i = 0; i + 1 < regions.size(); ++i) {
        ASSERT_EQ(regions[i].begin % 256, 0) << regions[i].name;
        ASSERT_LE(regions[i].begin + regions[i].bytes, regions[i + 1].begin)
            << regions[i].name << " reaches into " << regions[i + 1].name << ", R = " << num_ranks
            << ", T = " << tokens;
      }
    }
  }
}

TEST(Workspace, TheLargestOfAllCountsInSixtyFourBitsAndNumbersItsRoutesInThirtyTwo) {
  const WorkspaceShape shape = {.num_ranks = kMaxKernelRanks,
                                .max_tokens_per_rank = limits::kMaxTokensPerRank,
                                .max_top_k = limits::kMaxTopK,
                                .num_slots = 1024,
                                .hidden = limits::kMaxHiddenSize,
                                .intermediate = limits::kMaxIntermediateSize};
  EXPECT_LT(shape.max_routes(), int64_t{1} << 32);
  const std::vector<Region> regions = Regions(shape);
  for (size_t i = 0; i + 1 < regions.size(); ++i) {
    ASSERT_LE(regions[i].begin + regions[i].bytes, regions[i + 1].begin) << regions[i].name;
  }
}

// Where a step of so many routes is sorted by each CTA, each has room for it.
TEST(Workspace, OnlyShortStepsHaveAListForEachCta) {
  for (const int num_ranks : kRanks) {
    for (const int tokens : {1, 7, 682, 683, 8192}) {
      const WorkspaceShape shape = ProShape(num_ranks, tokens);
      const WorkspaceOffsets offsets = PlanWorkspace(shape);
      EXPECT_EQ(offsets.own_routes, std::min<int64_t>(shape.max_routes(), kOwnSortRoutes));
      EXPECT_LE(offsets.fc1_done - offsets.routes,
                (shape.max_routes() + kMaxCtas * kOwnSortRoutes) * 6 +
                    kMaxCtas * shape.num_slots * 4 + 3 * 256);
    }
  }
}

TEST(Workspace, WithOneRankNothingIsKeptForPeers) {
  const WorkspaceOffsets offsets = PlanWorkspace(ProShape(1, 1024));
  EXPECT_EQ(offsets.route_records, offsets.partial_records);
  EXPECT_EQ(offsets.partial_records, offsets.routes);
}

// On every rank the peers have blocks 0 .. R - 2, each its own.
TEST(Workspace, EveryPeerWritesABlockOfItsOwn) {
  for (const int num_ranks : kRanks) {
    for (int to = 0; to < num_ranks; ++to) {
      std::set<int> blocks;
      for (int from = 0; from < num_ranks; ++from) {
        if (from == to) continue;
        const int block = PeerIndex(from, to);
        ASSERT_GE(block, 0);
        ASSERT_LT(block, num_ranks - 1);
        ASSERT_TRUE(blocks.insert(block).second) << from << " to " << to << " of " << num_ranks;
      }
    }
  }
}

// One store of 16 bytes, aligned in every rank's mapping.
TEST(Workspace, EveryRecordLiesOnItsOwnSize) {
  static_assert(sizeof(RouteRecord) == kRecordBytes && alignof(RouteRecord) == kRecordBytes);
  for (const int num_ranks : kRanks) {
    for (const int tokens : {1, 7, 8191}) {
      const WorkspaceOffsets offsets = PlanWorkspace(ProShape(num_ranks, tokens));
      EXPECT_EQ(offsets.route_records % kRecordBytes, 0);
      EXPECT_EQ(offsets.partial_records % kRecordBytes, 0);
      EXPECT_EQ(offsets.bytes % kRecordBytes, 0);
    }
  }
}

TEST(Workspace, AHeaderKeepsItsStepTokensAndK) {
  for (const uint32_t step : {1u, 2u, 0xffffffffu}) {
    for (const int tokens : {0, 1, 255, 256, 8191, static_cast<int>(limits::kMaxTokensPerRank)}) {
      for (const int top_k : {1, 6, static_cast<int>(limits::kMaxTopK)}) {
        const RouteRecord header = RouteHeader(step, tokens, top_k);
        ASSERT_EQ(header.step, step);
        ASSERT_EQ(TokensOf(header), tokens);
        ASSERT_EQ(TopKOf(header), top_k);
      }
    }
  }
}

}  // namespace
}  // namespace expertd::layout
