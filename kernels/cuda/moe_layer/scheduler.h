#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/layout/host_device.h"

// The list of tiles of a step, the same on every CTA and on the host. A tile is a block of weight
// rows (1..4 tiles of 64 rows) times a block of one slot's tokens. The list holds all FC1 tiles,
// then all FC2 tiles; inside, by slot, then weight rows, then token tile, so that neighbours in the
// list share weights. Where partial rows go to other ranks FC2 goes by column block first: when all
// slots have done one, those columns of all tokens can go, while the next are computed. CTAs claim
// tiles in list order, and an FC2 tile waits for FC1 tiles only: always lower ones.
namespace expertd::cuda::moe_layer {

// How the routes of one slot are cut into token tiles of at most `cap` rows (a multiple of 8).
EXPERTD_HD constexpr int NumTokenTiles(int routes, int cap) { return (routes + cap - 1) / cap; }
// Rows of each of them, the last one fewer: as even as multiples of 8 allow.
EXPERTD_HD constexpr int TokenTileRows(int routes, int cap) {
  const int tiles = NumTokenTiles(routes, cap);
  return tiles == 0 ? 0 : ((routes + tiles - 1) / tiles + 7) / 8 * 8;
}

// The smallest of the ascending widths that holds `rows`; the last one if none does.
template <int kFirst, int... kRest>
EXPERTD_HD constexpr int RoundUp(int rows) {
  if constexpr (sizeof...(kRest) > 0) {
    if (rows > kFirst) return RoundUp<kRest...>(rows);
  }
  return kFirst;
}

// The largest of the ascending widths.
template <int kFirst, int... kRest>
EXPERTD_HD constexpr int Largest() {
  if constexpr (sizeof...(kRest) > 0) {
    return Largest<kRest...>();
  } else {
    return kFirst;
  }
}

enum class Phase : int32_t { kFc1 = 0, kFc2 = 1 };

struct Tile {
  Phase phase = Phase::kFc1;
  int slot = 0;
  int first_row_tile = 0;  // in tiles of 64 weight rows
  int num_row_tiles = 0;   // 1..4
  int token_tile = 0;      // global index of the token tile
  int tile_in_slot = 0;    // its index among the slot's token tiles
};

// Columns of y that FC2 computes of all slots before it goes on, in tiles of 64: 1024 columns.
inline constexpr int kColumnBlockTiles = 16;
static_assert(kColumnBlockTiles % 4 == 0, "a tile lies in one block");

// A run of slots whose tiles have one height, once or for several blocks of rows.
struct Section {
  uint32_t begin = 0;  // index of its first tile in the list
  Phase phase = Phase::kFc1;
  int16_t first_slot = 0;
  int16_t first_row_tile = 0;  // of the first block, in tiles of 64 weight rows
  int16_t height = 0;          // 64-row tiles a tile takes; the last of a slot may be lower
  int16_t row_tiles = 0;       // tiles over the rows of a block
  uint32_t block_tiles = 0;    // tiles of a block, if there are several; else 0
};

inline constexpr int kMaxSections = 6;

struct Schedule {
  Section sections[kMaxSections];
  int num_sections = 0;
  uint32_t num_tiles = 0;
  int fc1_row_tiles = 0;  // 64-row tiles of FC1, 2 I / 64
  int fc2_row_tiles = 0;  // 64-row tiles of FC2, H / 64
  int num_slots = 0;
};

namespace internal {

// Last index i in [low, high) with table[i] <= value; table[low] <= value.
EXPERTD_HD int FindLast(const uint32_t* table, int low, int high, uint32_t value) {
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The same by 32 lanes at once, of up to 32 * 33 entries: 32 of them are looked at, then those
// between two. count_lanes(holds): how many lanes there are of which holds(lane) is true.
template <typename CountLanes>
EXPERTD_HD int FindLastTogether(const uint32_t* table, int entries, uint32_t value,
                                CountLanes count_lanes) {
  const int stride = (entries + 31) / 32;
  const int blocks = count_lanes([&](int lane) {
    const int at = lane * stride;
    return at < entries && table[at] <= value;
  });
  const int first = (blocks - 1) * stride;
  return first + count_lanes([&](int lane) {
           const int at = first + 1 + lane;
           return lane < stride - 1 && at < entries && table[at] <= value;
         });
}

// One after the other; sections without tiles are left out. `writes`: on a GPU a whole warp makes
// the list, and one lane writes it.
struct SectionWriter {
  Schedule* out;
  bool writes;
  int num_sections = 0;
  uint32_t num_tiles = 0;

  // `rows` rows from `first_row` on, in tiles of 64, `blocks` times.
  EXPERTD_HD void Add(Phase phase, uint32_t token_tiles, int first_slot, int height, int first_row,
                      int rows, int blocks = 1) {
    const int row_tiles = (rows + height - 1) / height;
    const uint32_t tiles = token_tiles * static_cast<uint32_t>(row_tiles);
    if (tiles == 0 || blocks == 0) return;
    if (writes) {
      out->sections[num_sections] = {num_tiles,
                                     phase,
                                     static_cast<int16_t>(first_slot),
                                     static_cast<int16_t>(first_row),
                                     static_cast<int16_t>(height),
                                     static_cast<int16_t>(row_tiles),
                                     blocks > 1 ? tiles : 0u};
    }
    ++num_sections;
    num_tiles += tiles * static_cast<uint32_t>(blocks);
  }
};

}  // namespace internal

// What a list follows from beside the tokens of each slot. Divided here, before the launch.
struct ScheduleShape {
  int num_slots = 0;
  int fc1_row_tiles = 0;  // 64-row tiles of FC1
  int fc2_row_tiles = 0;
  uint32_t fc1_tiles = 0;      // tiles of 256 rows that a token tile has in FC1
  uint32_t few_fc1_tiles = 0;  // from so many on all of FC1 has 256 rows
  uint32_t ctas = 0;           // tiles of a wave
  uint32_t wave_tokens = 0;    // token tiles of one whole wave of FC1
  uint32_t two_wave_tokens = 0;
  int last_block_row = 0;    // where FC2's last column block begins; 0: it is the only one
  uint32_t last_tokens = 0;  // token tiles at the end of FC2 that have 128 rows
  uint32_t few_tokens = 0;   // up to so many token tiles all of FC2 has 128 rows

  ScheduleShape() = default;
  // `by_columns`: FC2 in column blocks.
  ScheduleShape(int slots, int fc1_rows, int fc2_rows, int num_ctas, bool by_columns)
      : num_slots(slots),
        fc1_row_tiles(fc1_rows),
        fc2_row_tiles(fc2_rows),
        fc1_tiles(static_cast<uint32_t>((fc1_rows + 3) / 4)),
        few_fc1_tiles(3 * static_cast<uint32_t>(num_ctas)),
        ctas(static_cast<uint32_t>(num_ctas)),
        wave_tokens(ctas / fc1_tiles),
        two_wave_tokens(2 * ctas / fc1_tiles),
        last_block_row(by_columns ? (fc2_rows - 1) / kColumnBlockTiles * kColumnBlockTiles : 0) {
    const uint32_t tiles = low_tiles(fc2_rows - last_block_row);
    last_tokens = std::max(1u, (2 * ctas + 3 * tiles) / (6 * tiles));
    few_tokens = last_tokens;
    if (last_block_row == 0) {
      const uint32_t most_tiles = std::max(fc1_tiles, static_cast<uint32_t>((fc2_rows + 3) / 4));
      few_tokens = std::max(few_tokens, (ctas - 1) / most_tiles);
    }
  }
  // Tiles of 128 rows that a token tile has.
  static constexpr uint32_t low_tiles(int rows) { return static_cast<uint32_t>((rows + 1) / 2); }
};

// tile_begin [num_slots + 1]: token tiles before each slot. Tiles of 256 rows stream best. 128 rows
// balance better: where FC1 has few tiles for the CTAs, those behind the last whole wave of 256
// rows, and the last slots of FC2 (the end of the list), about a third of a wave, or all of it
// where tiles of 256 rows make no wave in either phase. (A CTA takes 0.62 of the time of 256 rows
// for 128.) Column blocks that make less than two waves begin together: else the first wave of FC2
// would wait for slots of the last one of FC1. find_last(value): the last slot s with tile_begin[s]
// <= value.
template <typename FindLast>
EXPERTD_HD void WriteSchedule(const ScheduleShape& shape, const uint32_t* tile_begin,
                              FindLast find_last, bool writes, Schedule* out) {
  internal::SectionWriter writer = {out, writes};
  const uint32_t token_tiles = tile_begin[shape.num_slots];
  const uint32_t tiles = token_tiles * shape.fc1_tiles;
  int split = shape.num_slots;
  if (tiles < shape.few_fc1_tiles) {
    split = find_last(tiles < shape.ctas       ? 0
                      : tiles < 2 * shape.ctas ? shape.wave_tokens
                                               : shape.two_wave_tokens);
  }
  uint32_t before = tile_begin[split];
  writer.Add(Phase::kFc1, before, 0, 4, 0, shape.fc1_row_tiles);
  writer.Add(Phase::kFc1, token_tiles - before, split, 2, 0, shape.fc1_row_tiles);
  if (shape.last_block_row > 0 && token_tiles > 0) {
    const int blocks = shape.last_block_row / kColumnBlockTiles;
    const uint32_t two_waves =
        (2 * shape.ctas + kColumnBlockTiles / 4 - 1) / (kColumnBlockTiles / 4);
    const int needed = static_cast<int>((two_waves + token_tiles - 1) / token_tiles);
    const int together = needed < blocks ? needed : blocks;
    const int rows = together * kColumnBlockTiles;
    writer.Add(Phase::kFc2, token_tiles, 0, 4, 0, rows);
    writer.Add(Phase::kFc2, token_tiles, 0, 4, rows, kColumnBlockTiles, blocks - together);
  }
  const int last_rows = shape.fc2_row_tiles - shape.last_block_row;
  split = token_tiles > shape.few_tokens ? find_last(token_tiles - shape.last_tokens) : 0;
  before = tile_begin[split];
  writer.Add(Phase::kFc2, before, 0, 4, shape.last_block_row, last_rows);
  writer.Add(Phase::kFc2, token_tiles - before, split, 2, shape.last_block_row, last_rows);
  if (!writes) return;
  out->num_sections = writer.num_sections;
  out->num_tiles = writer.num_tiles;
  out->fc1_row_tiles = shape.fc1_row_tiles;
  out->fc2_row_tiles = shape.fc2_row_tiles;
  out->num_slots = shape.num_slots;
}

inline Schedule MakeSchedule(const uint32_t* tile_begin, int num_slots, int fc1_row_tiles,
                             int fc2_row_tiles, int num_ctas, bool by_columns) {
  Schedule schedule;
  WriteSchedule(
      ScheduleShape(num_slots, fc1_row_tiles, fc2_row_tiles, num_ctas, by_columns), tile_begin,
      [&](uint32_t value) { return internal::FindLast(tile_begin, 0, num_slots + 1, value); }, true,
      &schedule);
  return schedule;
}

// Tile `index` < num_tiles of the list.
EXPERTD_HD Tile TileAt(const Schedule& schedule, const uint32_t* tile_begin, uint32_t index) {
  int s = 0;
  while (s + 1 < schedule.num_sections && schedule.sections[s + 1].begin <= index) ++s;
  const Section& section = schedule.sections[s];
  const uint32_t row_tiles = static_cast<uint32_t>(section.row_tiles);
  uint32_t relative = index - section.begin;
  int first_row_tile = section.first_row_tile;
  if (section.block_tiles != 0) {
    const uint32_t block = relative / section.block_tiles;
    relative -= block * section.block_tiles;
    first_row_tile += static_cast<int>(block) * kColumnBlockTiles;
  }
  const uint32_t position = tile_begin[section.first_slot] + relative / row_tiles;
  Tile tile;
  tile.phase = section.phase;
  tile.slot = internal::FindLast(tile_begin, section.first_slot, schedule.num_slots, position);
  const uint32_t before = tile_begin[tile.slot] - tile_begin[section.first_slot];
  const uint32_t in_slot = relative - before * row_tiles;
  const uint32_t count = tile_begin[tile.slot + 1] - tile_begin[tile.slot];
  const int row_tile = static_cast<int>(in_slot / count);
  tile.tile_in_slot = static_cast<int>(in_slot - static_cast<uint32_t>(row_tile) * count);
  tile.token_tile = static_cast<int>(tile_begin[tile.slot]) + tile.tile_in_slot;
  tile.first_row_tile = first_row_tile + row_tile * section.height;
  const int rows = section.phase == Phase::kFc1 ? schedule.fc1_row_tiles : schedule.fc2_row_tiles;
  const int left = rows - tile.first_row_tile;
  tile.num_row_tiles = left < section.height ? left : section.height;
  return tile;
}

}  // namespace expertd::cuda::moe_layer
