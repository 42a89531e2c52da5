#pragma once

#include <cstdint>

#include "kernels/layout/packed_weights.h"
#include "kernels/layout/workspace.h"

// The numbers that shape the kernel. Plain C++: kernel_config sizes a launch from them.
namespace expertd::cuda::moe_layer {

// Warp roles: 16 warps multiply (4 warpgroups, one 64-row tile each), one streams weights, two
// gather tokens, the last one announces results. At the start all but the last one route, while
// that one sends the CTA's first rows; those that multiplied combine at the end.
inline constexpr int kExpertWarpgroups = 4;
inline constexpr int kExpertWarps = kExpertWarpgroups * 4;
inline constexpr int kTokenWarps = 2;
inline constexpr int kWarps = kExpertWarps + 1 + kTokenWarps + 1;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kAnnouncingWarp = kWarps - 1;
inline constexpr int kRoutingWarps = kWarps - 1;
inline constexpr int kRoutingThreads = kRoutingWarps * 32;

// Registers a thread: what is allocated at launch is moved from the producers to the consumers.
inline constexpr int kRegistersAtLaunch = 96;
inline constexpr int kExpertRegisters = 104;
inline constexpr int kProducerRegisters = 64;
static_assert(kThreads * kRegistersAtLaunch <= 65536, "a CTA fits the register file");
static_assert(kExpertRegisters * kExpertWarps + kProducerRegisters * (kWarps - kExpertWarps) <=
                  kRegistersAtLaunch * kWarps,
              "the increase waits for ever if it asks for more than the decrease gives");

// Named barriers of the hardware (0 is __syncthreads: at the kernel's start only, whoever waited
// there later would wait for the rows that the last warp sends).
// Warps that combine: the outputs are there.
inline constexpr int kCombineBarrier = 1;
inline constexpr int kCombiningThreads = kExpertWarps * 32;
// They and the announcing one: what that one has returned.
inline constexpr int kReturnedBarrier = 5;
inline constexpr int kReturningThreads = kCombiningThreads + 32;
// Warps that route: from one step of the sort to the next.
inline constexpr int kRoutingBarrier = 2;
// Warps that multiply: the first tokens, which they have brought themselves, are there.
inline constexpr int kFirstTokensBarrier = 3;
// Routing has ended: the warps that route arrive and go on, the announcing one waits for them.
inline constexpr int kRoutedBarrier = 4;

inline constexpr int kMaxStages = 6;
inline constexpr int kMaxTokenTile = 80;
// Of 80 rows and NVFP4's larger units no three stages fit.
constexpr int MaxTokenTile(layout::WeightFormat format) {
  return format == layout::WeightFormat::kMx ? kMaxTokenTile : 72;
}
// A compiled variant has two or three token widths (N of the multiplication) and serves launches
// whose token_tile is at most its largest. More widths in one kernel cost the compiler the overlap
// of multiplications with the expansion of the next weights.
inline constexpr int kNumVariants = 6;
inline constexpr int kVariantTokens[kNumVariants] = {16, 24, 32, 48, 64, kMaxTokenTile};
constexpr int VariantFor(int token_tile) {
  int variant = 0;
  while (variant + 1 < kNumVariants && kVariantTokens[variant] < token_tile) ++variant;
  return variant;
}
inline constexpr int kTileSlots = 3;      // tiles between the claiming warp and the last consumer
inline constexpr int kStateBytes = 3072;  // barriers and tiles at the head of shared memory
inline constexpr int kSendWindow = 64;    // tokens of a CTA that are sent in one order
inline constexpr int kMaxSlots =
    1024;  // expert slots of a rank: two tables of them lie in shared memory

// Whether a compiled variant has this width. A launch's token_tile must be one: tiles of up to that
// many rows are rounded up to a width, and a token stage holds token_tile rows.
constexpr bool HasWidth(layout::WeightFormat format, int tokens) {
  if (tokens < 8 || tokens > MaxTokenTile(format) || tokens % 8 != 0) return false;
  return format == layout::WeightFormat::kMx || (tokens != 40 && tokens != 56);
}

// A stage: 256 of K, for up to 256 weight rows and for the tokens of a tile.
inline constexpr int kStageUnits = 2;
inline constexpr int kStageBlocks = kStageUnits * 2;  // of 64 of K
inline constexpr int kStageK = kStageUnits * layout::kUnitK;
constexpr int WeightStageBytes(layout::WeightFormat format) {
  return kStageUnits * layout::kGroupTiles * layout::UnitBytes(format);
}
// The ring's begin is the first stage's: it is on its way while routes are still being sorted.
inline constexpr int kSortOffset = kStateBytes + WeightStageBytes(layout::WeightFormat::kNv);
constexpr int TokenStageBytes(int token_tile) { return token_tile * kStageK * 2; }

// Narrow variants are short of instruction slots: a stage's tokens lie behind its weights, so that
// the multiplying loop has one index and one address, and wait for one barrier with them. A
// launch's token_tile is then the variant's. Wide variants are short of tokens: these have a ring
// of their own and are waited for when the weights are in registers.
constexpr bool HasOneRing(int variant_tokens) { return variant_tokens <= 32; }
// From one weight stage to the next.
constexpr int WeightStride(layout::WeightFormat format, int variant_tokens) {
  return WeightStageBytes(format) +
         (HasOneRing(variant_tokens) ? TokenStageBytes(variant_tokens) : 0);
}
// In a CTA's own list of routes, if that is in shared memory.
inline constexpr int kNearRouteBytes = 2;
static_assert(layout::kOwnSortRoutes <= 1 << (8 * kNearRouteBytes));
// A larger x is not brought to L2 before it is needed.
inline constexpr int64_t kMaxPrefetchedTokenBytes = 8 << 20;

// Times that a CTA notes down when the kernel is built with EXPERTD_MOE_TIMING.
enum TimingMark {
  kMarkStart,
  kMarkRouted,
  kMarkSent,      // the announcing warp: every token row this CTA sends
  kMarkLastTile,  // the claiming thread: nothing more to claim
  kMarkCombine,   // multiplied everything
  kMarkOutputs,   // every FC2 tile of this rank is there
  kMarkEnd
};
inline constexpr int kTimingMarks = 8;
#ifdef EXPERTD_MOE_TIMING
inline constexpr bool kRecordTiming = true;
#else
inline constexpr bool kRecordTiming = false;
#endif

}  // namespace expertd::cuda::moe_layer
