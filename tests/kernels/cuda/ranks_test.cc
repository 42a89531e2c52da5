#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "config/cluster_spec.h"
#include "gtest/gtest.h"
#include "kernels/cuda/comm/peer.h"
#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/scheduler.h"
#include "kernels/cuda/moe_layer/traits.h"
#include "kernels/layout/workspace.h"

// What several ranks have to agree on without talking: who computes which route, where a peer's
// memory is, how far apart their steps may be. All of it for R = 8 and R = 32, on a CPU.
namespace expertd::cuda {
namespace {

using moe_layer::MakeSchedule;
using moe_layer::NumTokenTiles;
using moe_layer::Schedule;
using moe_layer::Tile;
using moe_layer::TileAt;
using moe_layer::TokenTileRows;

struct Model {
  const char* name;
  int experts;
  int top_k;
  int hidden;
  int intermediate;
};
constexpr Model kModels[] = {{"V4-Pro", 384, 6, 7168, 3072},
                             {"V4-Flash", 256, 6, 4096, 2048},
                             {"DeepSeek-V3", 256, 8, 7168, 2048}};
constexpr int kRanks[] = {8, 32};

// --- who computes a route

struct Route {
  int home;
  int token;
  int expert;  // or -1
};

std::vector<Route> RandomRoutes(const Model& model, int num_ranks, std::mt19937& random) {
  std::vector<Route> routes;
  for (int home = 0; home < num_ranks; ++home) {
    const int tokens = random() % 4 == 0 ? 0 : static_cast<int>(random() % 40);
    for (int token = 0; token < tokens; ++token) {
      for (int k = 0; k < model.top_k; ++k) {
        const int expert = static_cast<int>(random() % (model.experts + 4));
        routes.push_back({home, token, expert < model.experts ? expert : -1});
      }
    }
  }
  return routes;
}

// The routes that each slot of `rank` computes, as the kernel sorts them: by the tables only.
std::vector<std::vector<int>> RoutesBySlot(const Placement& placement, int rank,
                                           const std::vector<Route>& routes) {
  std::vector<std::vector<int>> by_slot(placement.slots_per_rank());
  for (size_t r = 0; r < routes.size(); ++r) {
    if (routes[r].expert < 0) continue;
    const int slot = placement.SlotFor(routes[r].expert, routes[r].token);
    if (slot / placement.slots_per_rank() != rank) continue;
    by_slot[slot % placement.slots_per_rank()].push_back(static_cast<int>(r));
  }
  return by_slot;
}

// Adds to `computed` what the tile list of one rank does: 64-row tiles of FC1 and FC2 by route.
void WalkTiles(const Model& model, const std::vector<std::vector<int>>& by_slot, int cap,
               int num_ctas, std::vector<int>* computed) {
  std::vector<uint32_t> tile_begin = {0};
  for (const std::vector<int>& routes : by_slot) {
    const int tiles = NumTokenTiles(static_cast<int>(routes.size()), cap);
    tile_begin.push_back(tile_begin.back() + static_cast<uint32_t>(tiles));
  }
  const Schedule schedule =
      MakeSchedule(tile_begin.data(), static_cast<int>(by_slot.size()), model.intermediate / 32,
                   model.hidden / 64, num_ctas, true);
  for (uint32_t index = 0; index < schedule.num_tiles; ++index) {
    const Tile tile = TileAt(schedule, tile_begin.data(), index);
    const std::vector<int>& routes = by_slot[tile.slot];
    const int rows = TokenTileRows(static_cast<int>(routes.size()), cap);
    const int begin = tile.tile_in_slot * rows;
    const int end = std::min(begin + rows, static_cast<int>(routes.size()));
    for (int i = begin; i < end; ++i) (*computed)[routes[i]] += tile.num_row_tiles;
  }
}

TEST(Ranks, TogetherComputeEveryRouteExactlyOnce) {
  std::mt19937 random(91);
  for (const Model& model : kModels) {
    for (const int num_ranks : kRanks) {
      const int even = (model.experts + num_ranks - 1) / num_ranks;
      for (const bool redundant : {false, true}) {
        const auto placement = redundant
                                   ? Placement::Redundant(model.experts, num_ranks, even + 3)
                                   : Placement::Contiguous(model.experts - 5, num_ranks);  // uneven
        ASSERT_TRUE(placement.ok());
        Model placed = model;
        placed.experts = placement->num_experts();
        const std::vector<Route> routes = RandomRoutes(placed, num_ranks, random);
        std::vector<int> computed(routes.size(), 0);
        for (int rank = 0; rank < num_ranks; ++rank) {
          WalkTiles(placed, RoutesBySlot(*placement, rank, routes), 16, 132, &computed);
        }
        const int row_tiles = model.intermediate / 32 + model.hidden / 64;
        for (size_t r = 0; r < routes.size(); ++r) {
          ASSERT_EQ(computed[r], routes[r].expert < 0 ? 0 : row_tiles)
              << model.name << ", R = " << num_ranks << ", route " << r;
        }
      }
    }
  }
}

TEST(Ranks, TokenTilesOfTheWorstRoutingFitTheWorkspace) {
  std::mt19937 random(92);
  for (const int num_ranks : kRanks) {
    const layout::WorkspaceShape shape = {.num_ranks = num_ranks,
                                          .max_tokens_per_rank = 64,
                                          .max_top_k = 8,
                                          .num_slots = 32,
                                          .hidden = 4096,
                                          .intermediate = 2048};
    for (int round = 0; round < 200; ++round) {
      // All routes of the group on one rank, cut among its slots at random.
      std::vector<int> slots(shape.num_slots, 0);
      const int busy = 1 + static_cast<int>(random() % slots.size());
      for (int64_t r = 0; r < shape.max_routes(); ++r) ++slots[random() % busy];
      for (int cap = 8; cap <= moe_layer::kMaxTokenTile; cap += 8) {
        int64_t tiles = 0;
        for (const int routes : slots) tiles += NumTokenTiles(routes, cap);
        ASSERT_LE(tiles, shape.max_token_tiles()) << "R = " << num_ranks << ", cap " << cap;
      }
    }
  }
}

// --- how a launch is shaped

TEST(Ranks, RTimesTheExpertsOnRRanksAreLaunchedAsOneRankIs) {
  for (const Model& model : kModels) {
    for (const int num_ranks : kRanks) {
      if (model.experts % num_ranks != 0) continue;
      for (const int tokens : {1, 8, 64, 256, 1024, 8192}) {
        LayerShape many = {.hidden = model.hidden,
                           .intermediate = model.intermediate,
                           .num_experts = model.experts,
                           .num_slots = model.experts / num_ranks,
                           .num_ranks = num_ranks};
        LayerShape one = many;
        one.num_experts = many.num_slots;
        one.num_ranks = 1;
        const auto as_many = ChooseKernelConfig(many, tokens, model.top_k, 132);
        const auto as_one = ChooseKernelConfig(one, tokens, model.top_k, 132);
        ASSERT_TRUE(as_many.ok() && as_one.ok());
        EXPECT_EQ(*as_many, *as_one) << as_many->ToString() << " and " << as_one->ToString();
        EXPECT_LE(as_many->shared_bytes, kMaxSharedBytes);
      }
    }
  }
}

// --- where a peer's memory is

TEST(Ranks, APeersAddressIsAnAffineFunctionOfItsRank) {
  constexpr int64_t kStride = int64_t{144} << 30;  // the flat range keeps as much for every rank
  for (const int num_ranks : kRanks) {
    // Addresses only; nothing is there.
    char* const base = reinterpret_cast<char*>(uintptr_t{1} << 40);
    const PeerMap map = {base, kStride, num_ranks - 1, num_ranks};
    std::set<char*> seen;
    for (int peer = 0; peer < num_ranks; ++peer) {
      char* const address = map.at<char>(peer, 4096);
      EXPECT_EQ(address - base, peer * kStride + 4096);
      EXPECT_TRUE(seen.insert(address).second);
    }
  }
}

// --- how far apart steps may be

// Ranks that run steps at their own pace under the rules of the exchange: a step starts by sending
// its ids to every peer, rows follow; what a peer sent is read while the step runs; a step needs
// every peer's ids before it returns partial rows, and every peer's partial rows before it ends.
class Pacing {
 public:
  Pacing(int num_ranks, int buffers) : buffers_(buffers), ranks_(num_ranks) {}

  // One rank does one thing. False: it has to wait.
  bool Advance(int rank) {
    Rank& me = ranks_[rank];
    switch (me.phase) {
      case kStart:
        ++me.step;
        for (size_t peer = 0; peer < ranks_.size(); ++peer) SendRows(rank, static_cast<int>(peer));
        me.phase = kCompute;
        return true;
      case kCompute:
        for (const Rank& peer : ranks_) {
          if (peer.step < me.step) return false;  // its ids of this step have not come
        }
        for (size_t peer = 0; peer < ranks_.size(); ++peer) {
          // Its partial rows of an earlier step must have been read.
          if (ranks_[peer].step != me.step) ++overwritten_;
        }
        me.phase = kCombine;
        return true;
      case kCombine:
        for (const Rank& peer : ranks_) {
          const bool returned =
              peer.step > me.step || peer.phase == kCombine || peer.ended(me.step);
          if (!returned) return false;
        }
        me.phase = kStart;
        return true;
    }
    return false;
  }

  int overwritten() const { return overwritten_; }
  int step(int rank) const { return ranks_[rank].step; }

 private:
  enum Phase { kStart, kCompute, kCombine };
  struct Rank {
    int step = 0;
    Phase phase = kStart;
    bool ended(int s) const { return step > s || (step == s && phase == kStart); }
  };

  // Rows of step s go where those of step s - buffers were: `to` must have ended that one.
  void SendRows(int from, int to) {
    if (from == to) return;
    const int before = ranks_[from].step - buffers_;
    if (before > 0 && !ranks_[to].ended(before)) ++overwritten_;
  }

  const int buffers_;
  std::vector<Rank> ranks_;
  int overwritten_ = 0;
};

// Runs ranks in random order, some of them much slower; returns what was overwritten too early.
int Overwritten(int num_ranks, int buffers, uint32_t seed) {
  std::mt19937 random(seed);
  Pacing pacing(num_ranks, buffers);
  for (int event = 0; event < 200'000; ++event) {
    int rank = static_cast<int>(random() % num_ranks);
    if (rank % 3 == 0 && random() % 8 != 0) rank = (rank + 1) % num_ranks;
    (void)pacing.Advance(rank);
  }
  for (int rank = 0; rank < num_ranks; ++rank) EXPECT_GT(pacing.step(rank), 50) << "no progress";
  return pacing.overwritten();
}

TEST(Ranks, TwoBuffersOfRowsAndOneOfPartialsAreEnoughAtAnyPace) {
  for (const int num_ranks : {2, 8, 32}) {
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      EXPECT_EQ(Overwritten(num_ranks, 2, seed), 0) << "R = " << num_ranks;
    }
  }
}

TEST(Ranks, OneBufferOfRowsWouldNotBeEnough) {
  for (const int num_ranks : {2, 8, 32}) EXPECT_GT(Overwritten(num_ranks, 1, 1), 0);
}

}  // namespace
}  // namespace expertd::cuda
