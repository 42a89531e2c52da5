#include "kernels/cpu/fp4_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "config/check.h"

// This file is compiled once for each instruction set; the best one that the machine has is chosen
// at run time. Scalable vectors are left out: Arm machines use NEON.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fp4_gemm.cc"
#include "hwy/foreach_target.h"
// highway.h has to follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace expertd::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using VecF = hn::Vec<F32>;
using VecU = hn::Vec<U32>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
constexpr int kVecs = 2;                        // row vectors of a micro tile
constexpr int64_t kMicroRows = kVecs * kLanes;  // rows of a micro tile, one a lane
static_assert(kRowTile % kMicroRows == 0, "a row tile is whole micro tiles");

// Tokens of a micro tile: kVecs * kMaxTokens accumulators, kVecs weights and one activation have to
// fit the register file: 32 registers with AVX-512 and NEON, 16 otherwise.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM
constexpr int kMaxTokens = 8;
#else
constexpr int kMaxTokens = 4;
#endif

// ---- decoding: the low nibble of each lane becomes its E2M1 value, exactly

#if HWY_TARGET <= HWY_AVX3

// One permutation of a 16-entry table; the instruction looks at the low four bits only.
constexpr float kScaleFactor = 1.0f;
HWY_INLINE VecF Lookup(VecU codes) {
  alignas(64) static constexpr float kTable[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                                   4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                                   -2.0f, -3.0f, -4.0f, -6.0f};
  return VecF{_mm512_permutexvar_ps(codes.raw, hn::Load(F32(), kTable).raw)};
}

#elif HWY_TARGET == HWY_AVX2

// An 8-entry table looked up by the low three bits; the sign is moved from bit 3.
constexpr float kScaleFactor = 1.0f;
HWY_INLINE VecF Lookup(VecU codes) {
  alignas(32) static constexpr float kTable[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const VecF magnitude{_mm256_permutevar8x32_ps(hn::Load(F32(), kTable).raw, codes.raw)};
  const VecU sign = hn::And(hn::ShiftLeft<28>(codes), hn::Set(U32(), 0x80000000u));
  return hn::Xor(magnitude, hn::BitCast(F32(), sign));
}

#else

// A byte table of twice the magnitude, converted to float; the scale takes the half back.
constexpr float kScaleFactor = 0.5f;
HWY_INLINE VecF Lookup(VecU codes) {
  alignas(16) static constexpr uint8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12,
                                                     0, 1, 2, 3, 4, 6, 8, 12};
  const hn::Repartition<uint8_t, U32> bytes;
  const VecU index = hn::And(codes, hn::Set(U32(), 15u));  // bytes 1..3 look up entry 0: zero
  const auto doubled =
      hn::TableLookupBytes(hn::LoadDup128(bytes, kTable), hn::BitCast(bytes, index));
  const hn::RebindToSigned<U32> signed_tag;
  const VecF magnitude = hn::ConvertTo(F32(), hn::BitCast(signed_tag, doubled));
  const VecU sign = hn::And(hn::ShiftLeft<28>(codes), hn::Set(U32(), 0x80000000u));
  return hn::Xor(magnitude, hn::BitCast(F32(), sign));
}

#endif

// The low byte of each lane as a block scale.
template <Recipe kRecipe>
HWY_INLINE VecF DecodeScale(VecU word) {
  const F32 f32;
  const U32 u32;
  const VecU byte = hn::And(word, hn::Set(u32, 0xffu));
  VecF scale;
  if constexpr (kRecipe == Recipe::kMxfp4) {
    // The exponent field itself; byte 0 (2^-127, zero blocks only) becomes 0.
    scale = hn::BitCast(f32, hn::ShiftLeft<23>(byte));
  } else {
    // E4M3 with its exponent rebiased by 120; a subnormal m * 2^-9 is (1 + m/8) * 2^-6 - 2^-6.
    const VecU magnitude = hn::And(byte, hn::Set(u32, 0x7fu));
    const VecU bits = hn::ShiftLeft<20>(magnitude);
    const VecF normal = hn::BitCast(f32, hn::Add(bits, hn::Set(u32, 120u << 23)));
    const VecF subnormal =
        hn::Sub(hn::BitCast(f32, hn::Add(bits, hn::Set(u32, 121u << 23))), hn::Set(f32, 0x1p-6f));
    const auto is_subnormal = hn::RebindMask(f32, hn::Lt(magnitude, hn::Set(u32, 8u)));
    const VecU sign = hn::ShiftLeft<24>(hn::And(byte, hn::Set(u32, 0x80u)));
    scale = hn::Xor(hn::IfThenElse(is_subnormal, subnormal, normal), hn::BitCast(f32, sign));
  }
  if constexpr (kScaleFactor != 1.0f) scale = hn::Mul(scale, hn::Set(f32, kScaleFactor));
  return scale;
}

// ---- reading: rows of the file become lanes

// 16 bytes of rows p, p + 4 strides, p + 8 strides...: one 128-bit block each.
template <class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const uint8_t* p, int64_t stride) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return hn::BitCast(d, hn::LoadU(hn::Repartition<uint8_t, D>(), p));
  } else {
    const hn::Half<D> half;
    constexpr int64_t kHalfRows = static_cast<int64_t>(hn::MaxLanes(half));
    return hn::Combine(d, LoadBlocks(half, p + kHalfRows * stride, stride),
                       LoadBlocks(half, p, stride));
  }
}

// 32 weights of each of kLanes rows: words[j] lane r holds the eight codes of k = 8j .. 8j+7 of row
// r, the lowest nibble first. A 4x4 transposition inside each 128-bit block.
HWY_INLINE void LoadCodes(const uint8_t* p, int64_t stride, VecU words[4]) {
  const U32 d;
  const hn::Repartition<uint64_t, U32> d64;
  const VecU r0 = LoadBlocks(d, p, stride);
  const VecU r1 = LoadBlocks(d, p + stride, stride);
  const VecU r2 = LoadBlocks(d, p + 2 * stride, stride);
  const VecU r3 = LoadBlocks(d, p + 3 * stride, stride);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  words[0] = hn::BitCast(d, hn::InterleaveLower(d64, low01, low23));
  words[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23));
  words[2] = hn::BitCast(d, hn::InterleaveLower(d64, high01, high23));
  words[3] = hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23));
}

// Four scale bytes of each of kLanes rows; the last may lie beyond the row (kReadPadding).
HWY_INLINE VecU LoadScaleWords(const uint8_t* p, int64_t stride) {
  alignas(64) uint32_t words[kLanes];
  for (int row = 0; row < kLanes; ++row) std::memcpy(&words[row], p + row * stride, 4);
  return hn::Load(U32(), words);
}

// A micro tile of a matrix: kMicroRows rows from `codes`, `scales` on.
struct Tile {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t code_stride;
  int64_t scale_stride;
};

// Calls use(k, weights[kVecs]) for k_begin <= k < k_begin + count in ascending order; both are
// multiples of 32, k_begin of 128. `weights` are exact: e2m1 * scale has at most six significant
// bits.
template <Recipe kRecipe, class Use>
HWY_INLINE void ForEachColumn(const Tile& tile, int64_t k_begin, int64_t count, Use use) {
  constexpr int64_t kGroup = ScaleGroup(kRecipe);
  constexpr int64_t kWordColumns = 4 * kGroup;  // K that four scale bytes cover
  VecU scale_words[kVecs];
  for (int64_t k = k_begin; k < k_begin + count; k += 32) {
    VecU words[kVecs][4];
    HWY_UNROLL(2)
    for (int v = 0; v < kVecs; ++v) {
      LoadCodes(tile.codes + v * kLanes * tile.code_stride + k / 2, tile.code_stride, words[v]);
      if (k % kWordColumns == 0) {
        scale_words[v] = LoadScaleWords(tile.scales + v * kLanes * tile.scale_stride + k / kGroup,
                                        tile.scale_stride);
      }
    }
    VecF scale[kVecs];
    HWY_UNROLL(4)
    for (int j = 0; j < 4; ++j) {
      HWY_UNROLL(2)
      for (int v = 0; v < kVecs; ++v) {
        if ((8 * j) % kGroup != 0) continue;
        scale[v] = DecodeScale<kRecipe>(scale_words[v]);
        scale_words[v] = hn::ShiftRight<8>(scale_words[v]);
      }
      HWY_UNROLL(8)
      for (int i = 0; i < 8; ++i) {
        VecF weights[kVecs];
        HWY_UNROLL(2)
        for (int v = 0; v < kVecs; ++v) {
          weights[v] = hn::Mul(Lookup(words[v][j]), scale[v]);
          words[v][j] = hn::ShiftRight<4>(words[v][j]);
        }
        use(k + 8 * j + i, weights);
      }
    }
  }
}

// Columns of a micro tile whose codes fill a cache line.
constexpr int64_t kColumnsPerLine = 64 * 2 / kMicroRows;

// ---- few tokens: weights go from the file's bytes through registers into the sums

template <Recipe kRecipe, int kTokens>
HWY_NOINLINE void Stream(const Tile& tile, int64_t in, const float* const* x, float second_level,
                         float* out, int64_t out_stride) {
  const F32 d;
  const float* rows[kTokens];
  VecF sums[kTokens][kVecs];
  HWY_UNROLL(8)
  for (int n = 0; n < kTokens; ++n) {
    rows[n] = x[n];
    sums[n][0] = sums[n][1] = hn::Zero(d);
  }
  // The codes of the next tile lie right behind this one's: they are fetched while this one is
  // computed, one line every kColumnsPerLine columns. Behind the last tile a prefetch cannot fault.
  const uint8_t* next = tile.codes + kMicroRows * tile.code_stride;
  ForEachColumn<kRecipe>(tile, 0, in, [&](int64_t k, const VecF* weights) HWY_ATTR {
    if (k % kColumnsPerLine == 0) __builtin_prefetch(next + k / kColumnsPerLine * 64, 0, 2);
    HWY_UNROLL(8)
    for (int n = 0; n < kTokens; ++n) {
      const VecF activation = hn::Set(d, rows[n][k]);
      sums[n][0] = hn::MulAdd(weights[0], activation, sums[n][0]);
      sums[n][1] = hn::MulAdd(weights[1], activation, sums[n][1]);
    }
  });
  const VecF factor = hn::Set(d, second_level);
  for (int n = 0; n < kTokens; ++n) {
    hn::StoreU(hn::Mul(sums[n][0], factor), d, out + n * out_stride);
    hn::StoreU(hn::Mul(sums[n][1], factor), d, out + n * out_stride + kLanes);
  }
}

// ---- many tokens: a tile of weights is decoded once and used by all

template <Recipe kRecipe>
HWY_NOINLINE void DecodeTile(const Tile& tile, int64_t k_begin, int64_t count, float* decoded) {
  const F32 d;
  ForEachColumn<kRecipe>(tile, k_begin, count, [&](int64_t k, const VecF* weights) HWY_ATTR {
    float* at = decoded + (k - k_begin) * kMicroRows;
    hn::Store(weights[0], d, at);
    hn::Store(weights[1], d, at + kLanes);
  });
}

// Adds columns [k_begin, k_begin + count) to the sums that wait in `out`; the first call starts at
// zero, the last applies `factor`.
template <int kTokens>
HWY_NOINLINE void Accumulate(const float* decoded, int64_t k_begin, int64_t count,
                             const float* const* x, bool first, const float* factor, float* out,
                             int64_t out_stride) {
  const F32 d;
  const float* rows[kTokens];
  VecF sums[kTokens][kVecs];
  HWY_UNROLL(8)
  for (int n = 0; n < kTokens; ++n) {
    rows[n] = x[n] + k_begin;
    const float* from = out + n * out_stride;
    sums[n][0] = first ? hn::Zero(d) : hn::LoadU(d, from);
    sums[n][1] = first ? hn::Zero(d) : hn::LoadU(d, from + kLanes);
  }
  for (int64_t k = 0; k < count; ++k) {
    const VecF w0 = hn::Load(d, decoded + k * kMicroRows);
    const VecF w1 = hn::Load(d, decoded + k * kMicroRows + kLanes);
    HWY_UNROLL(8)
    for (int n = 0; n < kTokens; ++n) {
      const VecF activation = hn::Set(d, rows[n][k]);
      sums[n][0] = hn::MulAdd(w0, activation, sums[n][0]);
      sums[n][1] = hn::MulAdd(w1, activation, sums[n][1]);
    }
  }
  HWY_UNROLL(8)
  for (int n = 0; n < kTokens; ++n) {
    if (factor != nullptr) {
      sums[n][0] = hn::Mul(sums[n][0], hn::Set(d, *factor));
      sums[n][1] = hn::Mul(sums[n][1], hn::Set(d, *factor));
    }
    hn::StoreU(sums[n][0], d, out + n * out_stride);
    hn::StoreU(sums[n][1], d, out + n * out_stride + kLanes);
  }
}

// ---- the loops around the micro tiles

Tile TileAt(const Fp4Matrix& matrix, int64_t row) {
  const int64_t code_stride = matrix.in / 2;
  const int64_t scale_stride = matrix.in / ScaleGroup(matrix.recipe);
  return {matrix.codes + row * code_stride, matrix.scales + row * scale_stride, code_stride,
          scale_stride};
}

// call.template operator()<kTokens>() for the run-time `tokens` of 1..kMaxTokens.
template <int kTokens = kMaxTokens, class Call>
HWY_INLINE void WithTokens(int64_t tokens, Call call) {
  if (tokens == kTokens) {
    call.template operator()<kTokens>();
  } else if constexpr (kTokens > 1) {
    WithTokens<kTokens - 1>(tokens, call);
  }
}

template <Recipe kRecipe>
void GemmFewTokens(const GemmTask& task) {
  for (int64_t row = task.row_begin; row < task.row_end; row += kMicroRows) {
    const Tile tile = TileAt(task.matrix, row);
    WithTokens(task.num_tokens, [&]<int kTokens>() {
      Stream<kRecipe, kTokens>(tile, task.matrix.in, task.x, task.matrix.second_level,
                               task.out + row - task.row_begin, task.out_stride);
    });
  }
}

template <Recipe kRecipe>
void GemmManyTokens(const GemmTask& task) {
  // Groups of nearly equal size: a last group of one token would wait for its own sums.
  const int64_t num_groups = (task.num_tokens + kMaxTokens - 1) / kMaxTokens;
  for (int64_t k = 0; k < task.matrix.in; k += kDecodeColumns) {
    const int64_t count = std::min(kDecodeColumns, task.matrix.in - k);
    const bool last = k + count == task.matrix.in;
    for (int64_t row = task.row_begin; row < task.row_end; row += kMicroRows) {
      DecodeTile<kRecipe>(TileAt(task.matrix, row), k, count, task.scratch);
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t begin = task.num_tokens * group / num_groups;
        const int64_t end = task.num_tokens * (group + 1) / num_groups;
        float* out = task.out + begin * task.out_stride + row - task.row_begin;
        WithTokens(end - begin, [&]<int kTokens>() {
          Accumulate<kTokens>(task.scratch, k, count, task.x + begin, k == 0,
                              last ? &task.matrix.second_level : nullptr, out, task.out_stride);
        });
      }
    }
  }
}

template <Recipe kRecipe>
void GemmOf(const GemmTask& task) {
  if (task.num_tokens <= kMaxTokens) {
    GemmFewTokens<kRecipe>(task);
  } else {
    GemmManyTokens<kRecipe>(task);
  }
}

void Gemm(const GemmTask& task) {
  if (task.matrix.recipe == Recipe::kMxfp4) {
    GemmOf<Recipe::kMxfp4>(task);
  } else {
    GemmOf<Recipe::kNvfp4>(task);
  }
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace expertd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace expertd::cpu {

HWY_EXPORT(Gemm);
HWY_EXPORT(TargetName);

void Fp4Gemm(const GemmTask& task) {
  EXPERTD_CHECK(task.row_begin % kRowTile == 0 && task.row_end % kRowTile == 0);
  EXPERTD_CHECK(task.matrix.in % 32 == 0);
  if (task.num_tokens == 0) return;
  HWY_DYNAMIC_DISPATCH(Gemm)(task);
}

void SwiGlu(const float* g, const float* u, float limit, int64_t count, float* h) {
  for (int64_t i = 0; i < count; ++i) {
    const float gate = limit > 0 && g[i] > limit ? limit : g[i];
    float up = u[i];
    if (limit > 0 && up > limit) up = limit;
    if (limit > 0 && up < -limit) up = -limit;
    h[i] = gate / (1.0f + std::exp(-gate)) * up;
  }
}

std::string InstructionSet() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

std::vector<std::string> InstructionSets() {
  std::vector<std::string> names;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    names.push_back(hwy::TargetName(target));
  }
  return names;
}

void ForceInstructionSetForTest(const std::string& name) {
  int64_t forced = 0;  // Highway's value for the real machine
  hwy::SetSupportedTargetsForTest(0);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (name == hwy::TargetName(target)) forced = target;
  }
  EXPERTD_CHECK(name.empty() || forced != 0);
  hwy::SetSupportedTargetsForTest(forced);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace expertd::cpu
#endif  // HWY_ONCE
