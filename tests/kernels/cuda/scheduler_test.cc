#include "kernels/cuda/moe_layer/scheduler.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace expertd::cuda::moe_layer {
namespace {

struct Shape {
  int intermediate;
  int hidden;
  int cap;
  int num_ctas;
};

// The tables that the kernel builds from the routes of each slot.
std::vector<uint32_t> TileBegin(const std::vector<int>& routes, int cap) {
  std::vector<uint32_t> begin(1, 0);
  for (const int count : routes) {
    begin.push_back(begin.back() + static_cast<uint32_t>(NumTokenTiles(count, cap)));
  }
  return begin;
}

// Every (slot, token tile, 64-row tile) of both phases comes exactly once, and what an FC2 tile
// waits for comes before it.
void ExpectCompleteAndOrdered(const std::vector<int>& routes, const Shape& shape, bool by_columns) {
  const int num_slots = static_cast<int>(routes.size());
  const auto tile_begin = TileBegin(routes, shape.cap);
  const int fc1_rows = shape.intermediate / 32;
  const int fc2_rows = shape.hidden / 64;
  const Schedule schedule =
      MakeSchedule(tile_begin.data(), num_slots, fc1_rows, fc2_rows, shape.num_ctas, by_columns);
  std::map<std::tuple<int, int, int>, uint32_t> seen;  // (phase, token tile, row tile) -> index
  std::vector<int> fc1_written(tile_begin.back(), 0);
  for (uint32_t index = 0; index < schedule.num_tiles; ++index) {
    const Tile tile = TileAt(schedule, tile_begin.data(), index);
    ASSERT_GE(tile.slot, 0);
    ASSERT_LT(tile.slot, num_slots);
    ASSERT_EQ(tile.token_tile, static_cast<int>(tile_begin[tile.slot]) + tile.tile_in_slot);
    ASSERT_LT(tile.token_tile, static_cast<int>(tile_begin[tile.slot + 1]));
    ASSERT_GE(tile.num_row_tiles, 1);
    ASSERT_LE(tile.num_row_tiles, 4);
    ASSERT_EQ(tile.first_row_tile / 4, (tile.first_row_tile + tile.num_row_tiles - 1) / 4)
        << "a tile lies in one group of the packed layout";
    for (int r = 0; r < tile.num_row_tiles; ++r) {
      const auto key =
          std::tuple(static_cast<int>(tile.phase), tile.token_tile, tile.first_row_tile + r);
      ASSERT_TRUE(seen.emplace(key, index).second) << "twice: index " << index;
    }
    if (tile.phase == Phase::kFc1) {
      fc1_written[tile.token_tile] += tile.num_row_tiles;
    } else {
      ASSERT_EQ(fc1_written[tile.token_tile], fc1_rows) << "FC2 tile " << index << " is too early";
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(tile_begin.back()) * (fc1_rows + fc2_rows));
}
void ExpectCompleteAndOrdered(const std::vector<int>& routes, const Shape& shape) {
  for (const bool by_columns : {false, true}) ExpectCompleteAndOrdered(routes, shape, by_columns);
}

const Shape kShapes[] = {{3072, 7168, 16, 132}, {2048, 7168, 80, 132}, {2880, 2880, 24, 132},
                         {64, 64, 8, 132},      {1536, 4096, 16, 1},   {192, 320, 48, 7}};

TEST(Scheduler, EvenRoutingIsCoveredOnce) {
  for (const Shape& shape : kShapes) {
    for (int routes : {1, 8, 17, 100}) {
      ExpectCompleteAndOrdered(std::vector<int>(48, routes), shape);
    }
  }
}

TEST(Scheduler, RandomAndSkewedRoutingIsCoveredOnce) {
  std::mt19937 random(7);
  for (const Shape& shape : kShapes) {
    for (int round = 0; round < 30; ++round) {
      std::vector<int> routes(1 + random() % 64);
      for (int& count : routes) {
        count = random() % 3 == 0 ? 0 : static_cast<int>(random() % (random() % 5 == 0 ? 500 : 20));
      }
      ExpectCompleteAndOrdered(routes, shape);
    }
  }
}

TEST(Scheduler, NoRoutesMeanNoTiles) {
  for (const Shape& shape : kShapes) ExpectCompleteAndOrdered(std::vector<int>(9, 0), shape);
}

TEST(Scheduler, EverythingToTheFirstOrTheLastOfManySlotsIsCoveredOnce) {
  for (const int slot : {0, 1023}) {
    std::vector<int> routes(1024, 0);
    routes[slot] = 8192;
    ExpectCompleteAndOrdered(routes, kShapes[0]);
  }
}

// By columns a token tile has fewer low tiles at the end, so that more of them have low ones: about
// a third of a wave either way.
TEST(Scheduler, TheEndOfTheListHasLowTilesSoThatCtasFinishTogether) {
  const std::vector<int> routes(48, 8);
  const auto tile_begin = TileBegin(routes, 16);
  for (const auto& [by_columns, low_tiles] : {std::pair(false, 56), std::pair(true, 48)}) {
    const Schedule schedule = MakeSchedule(tile_begin.data(), 48, 96, 112, 132, by_columns);
    EXPECT_EQ(TileAt(schedule, tile_begin.data(), 0).num_row_tiles, 4);
    const uint32_t first_low = schedule.num_tiles - low_tiles;
    EXPECT_EQ(TileAt(schedule, tile_begin.data(), first_low - 1).num_row_tiles, 4);
    for (uint32_t i = first_low; i < schedule.num_tiles; ++i) {
      EXPECT_EQ(TileAt(schedule, tile_begin.data(), i).num_row_tiles, 2) << i;
    }
  }
}

// 4096 x 2048: 16 tiles of 256 rows a slot in either phase; eight slots make 128 of 132.
TEST(Scheduler, WhereNeitherPhaseMakesAWaveAllTilesAreLow) {
  for (const int slots : {1, 8, 9}) {
    const auto tile_begin = TileBegin(std::vector<int>(slots, 1), 16);
    const Schedule schedule = MakeSchedule(tile_begin.data(), slots, 64, 64, 132, false);
    int high = 0;
    for (uint32_t i = 0; i < schedule.num_tiles; ++i) {
      high += TileAt(schedule, tile_begin.data(), i).num_row_tiles == 4;
    }
    EXPECT_EQ(high, slots < 9 ? 0 : 8 * 16 + 8 * 16) << slots;
  }
}

// By column block: how many tiles of FC2 there are up to its last. Slots have 8 routes each.
std::vector<int> TilesUntilBlocksEnd(int token_tiles, int hidden) {
  const auto tile_begin = TileBegin(std::vector<int>(token_tiles, 8), 8);
  const Schedule schedule =
      MakeSchedule(tile_begin.data(), token_tiles, 96, hidden / 64, 132, true);
  std::vector<int> ends((hidden / 64 + kColumnBlockTiles - 1) / kColumnBlockTiles, 0);
  int fc2_tiles = 0;
  for (uint32_t index = 0; index < schedule.num_tiles; ++index) {
    const Tile tile = TileAt(schedule, tile_begin.data(), index);
    if (tile.phase == Phase::kFc2) ends[tile.first_row_tile / kColumnBlockTiles] = ++fc2_tiles;
  }
  return ends;
}

TEST(Scheduler, ColumnBlocksEndOneAfterTheOther) {
  EXPECT_EQ(TilesUntilBlocksEnd(100, 4096), (std::vector<int>{400, 800, 1200, 1600 + 48 - 24}));
}

TEST(Scheduler, ColumnBlocksOfLessThanTwoWavesBeginTogether) {
  // 48 x 4 tiles are 1.5 waves of 132. Of blocks 0 and 1 each slot has 8 tiles in a row.
  const std::vector<int> of_48 = TilesUntilBlocksEnd(48, 4096);
  EXPECT_EQ(of_48[0], 48 * 8 - 4);
  EXPECT_EQ(of_48[1], 48 * 8);
  EXPECT_EQ(of_48[2], 48 * 12);
  // One token tile: all but the last begin together.
  const std::vector<int> of_one = TilesUntilBlocksEnd(1, 4096);
  EXPECT_EQ(of_one[2], 12);
  EXPECT_EQ(of_one[3], 12 + 8);
  // A width of up to 1024 columns is one block.
  EXPECT_EQ(TilesUntilBlocksEnd(1, 1024), std::vector<int>{8});
}

// What a warp does on a GPU.
int FindTogether(const std::vector<uint32_t>& table, uint32_t value) {
  return internal::FindLastTogether(table.data(), static_cast<int>(table.size()), value,
                                    [](auto holds) {
                                      int lanes = 0;
                                      for (int lane = 0; lane < 32; ++lane) lanes += holds(lane);
                                      return lanes;
                                    });
}

TEST(Scheduler, LanesTogetherFindWhatOneFinds) {
  std::mt19937 random(11);
  for (const int size : {2, 3, 31, 32, 33, 34, 49, 63, 64, 65, 385, 1023, 1024, 1025}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<uint32_t> table(1, 0);
      while (static_cast<int>(table.size()) < size) {
        table.push_back(table.back() + (round == 0 ? 0 : random() % (1 + round / 2)));
      }
      for (uint32_t value = 0; value <= table.back() + 1; value += 1 + table.back() / 400) {
        ASSERT_EQ(FindTogether(table, value), internal::FindLast(table.data(), 0, size, value))
            << size << " entries, value " << value;
      }
    }
  }
}

TEST(Scheduler, AWarpWritesTheListThatOneThreadMakes) {
  std::mt19937 random(12);
  for (const Shape& shape : kShapes) {
    for (int round = 0; round < 50; ++round) {
      std::vector<int> routes(1 + random() % 400);
      const int most = 1 << (round % 8);
      for (int& count : routes) count = static_cast<int>(random() % most);
      const auto tile_begin = TileBegin(routes, shape.cap);
      const int num_slots = static_cast<int>(routes.size());
      const bool by_columns = round % 2 != 0;
      const Schedule expected = MakeSchedule(tile_begin.data(), num_slots, shape.intermediate / 32,
                                             shape.hidden / 64, shape.num_ctas, by_columns);
      Schedule found;
      const ScheduleShape known(num_slots, shape.intermediate / 32, shape.hidden / 64,
                                shape.num_ctas, by_columns);
      for (const bool writes : {false, true}) {
        WriteSchedule(
            known, tile_begin.data(),
            [&](uint32_t value) { return FindTogether(tile_begin, value); }, writes, &found);
        if (!writes) {
          ASSERT_EQ(found.num_sections, 0);
        }
      }
      ASSERT_EQ(found.num_sections, expected.num_sections);
      ASSERT_EQ(found.num_tiles, expected.num_tiles);
      for (int s = 0; s < found.num_sections; ++s) {
        ASSERT_EQ(found.sections[s].begin, expected.sections[s].begin);
        ASSERT_EQ(found.sections[s].phase, expected.sections[s].phase);
        ASSERT_EQ(found.sections[s].first_slot, expected.sections[s].first_slot);
        ASSERT_EQ(found.sections[s].height, expected.sections[s].height);
        ASSERT_EQ(found.sections[s].first_row_tile, expected.sections[s].first_row_tile);
        ASSERT_EQ(found.sections[s].row_tiles, expected.sections[s].row_tiles);
        ASSERT_EQ(found.sections[s].block_tiles, expected.sections[s].block_tiles);
      }
    }
  }
}

TEST(TokenTiles, HoldAllRoutesAndNoTileIsEmptyOrOverTheCap) {
  for (int cap = 8; cap <= 80; cap += 8) {
    for (int routes = 0; routes <= 400; ++routes) {
      const int tiles = NumTokenTiles(routes, cap);
      const int rows = TokenTileRows(routes, cap);
      ASSERT_EQ(rows % 8, 0);
      ASSERT_LE(rows, cap);
      ASSERT_GE(tiles * rows, routes);
      if (tiles > 0) {
        ASSERT_LT((tiles - 1) * rows, routes) << routes << " by " << cap;
      }
    }
  }
}

TEST(TokenTiles, WidthIsTheSmallestThatHoldsTheRows) {
  EXPECT_EQ((RoundUp<8, 16, 24>(1)), 8);
  EXPECT_EQ((RoundUp<8, 16, 24>(8)), 8);
  EXPECT_EQ((RoundUp<8, 16, 24>(9)), 16);
  EXPECT_EQ((RoundUp<8, 16, 24>(24)), 24);
  EXPECT_EQ((RoundUp<64, 72, 80>(3)), 64);
}

}  // namespace
}  // namespace expertd::cuda::moe_layer
