#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/pack_weights.h"

namespace expertd::cuda {
namespace {

using layout::PackedMatrix;
using layout::WeightFormat;

constexpr int kThreads = layout::kUnitThreads;
constexpr int kMxGroup = 32;
constexpr int kNvGroup = 16;

// What one launch packs: a whole FC2 slot, or the half of an FC1 slot's rows that gate or up fills.
struct PackJob {
  PackedMatrix matrix;
  int only_half;          // 0 gate, 1 up: packed rows of this half; -1: all rows (FC2)
  const uint8_t* codes;   // [out, k/2]
  const uint8_t* scales;  // [out, k/group]
  float second_level;
  uint8_t* units;  // of the slot
  float* factors;  // of the slot, [tiles, 2]
  int32_t* bases;  // [tiles, 2] scratch: MxBase of each half tile
};

// Row of the file's matrix that lies in packed row `row`.
__device__ int source_row(const PackJob& job, int row) {
  return job.only_half < 0 ? row : layout::Fc1Column(row);
}

__device__ bool is_mine(const PackJob& job, int half) {
  return job.only_half < 0 || job.only_half == half;
}

// All codes of a block +0 or -0. `bytes` is 16-byte (32 codes) or 8-byte (16 codes) aligned.
__device__ bool is_zero_block(const uint8_t* codes, int bytes) {
  uint32_t magnitudes = 0;
  for (int i = 0; i < bytes; i += 4) {
    magnitudes |= *reinterpret_cast<const uint32_t*>(codes + i) & 0x77777777u;
  }
  return magnitudes == 0;
}

// A block for each half tile: the largest scale byte of its non-zero blocks decides the base.
__global__ void find_factors(PackJob job) {
  const int tile = blockIdx.x;
  const int half = blockIdx.y;
  if (!is_mine(job, half)) return;
  __shared__ int largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  if (job.matrix.format == WeightFormat::kMx) {
    const int blocks = job.matrix.k / kMxGroup;
    int mine = 0;
    for (int i = threadIdx.x; i < 32 * blocks; i += kThreads) {
      const int slab_row = i / blocks;  // 0..31: 4 slabs of 8 rows
      const int row = tile * layout::kTileRows + slab_row / 8 * 16 + half * 8 + slab_row % 8;
      const int64_t block = int64_t{source_row(job, row)} * blocks + i % blocks;
      if (is_zero_block(job.codes + block * (kMxGroup / 2), kMxGroup / 2)) continue;
      mine = max(mine, static_cast<int>(job.scales[block]));
    }
    atomicMax(&largest, mine);
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const int base = job.matrix.format == WeightFormat::kMx ? layout::MxBase(largest) : 0;
  job.bases[tile * 2 + half] = base;
  job.factors[tile * 2 + half] = job.matrix.format == WeightFormat::kMx
                                     ? ldexpf(job.second_level, base)
                                     : job.second_level * layout::kNvFactor;
}

// Word (half, thread, i) of a unit: 4 bytes of the file, one a pair. Codes beyond K, and those of a
// block whose scale is 0 (which has no packed form), become 0.
__device__ uint32_t code_word(const PackJob& job, int tile, int unit_k, int half, int i) {
  const int thread = threadIdx.x;
  const int row = tile * layout::kTileRows + layout::WordRow(thread, i);
  const int block = layout::WordBlock(half, i);
  uint32_t word = 0;
  for (int pair = 0; pair < 4; ++pair) {
    const int k = unit_k * layout::kUnitK + layout::WordK(block, thread, pair, 0);
    if (k >= job.matrix.k) continue;
    const int64_t source = source_row(job, row);
    uint32_t codes = job.codes[source * (job.matrix.k / 2) + k / 2];
    if (job.matrix.format == WeightFormat::kNv) {
      const uint32_t scale = job.scales[source * (job.matrix.k / kNvGroup) + k / kNvGroup];
      if ((scale & 0x7fu) == 0) continue;
      if (scale & 0x80u) codes ^= 0x88u;  // the packed scale has no sign
    }
    word |= layout::PlaceCode(codes & 15u, pair, 0) | layout::PlaceCode(codes >> 4, pair, 1);
  }
  return word;
}

__device__ uint32_t mx_scale_word(const PackJob& job, int row, int unit_k, int base) {
  const int blocks = job.matrix.k / kMxGroup;
  uint32_t word = 0;
  for (int j = 0; j < 4; ++j) {
    const int column = unit_k * 4 + j;
    uint32_t value = layout::kMxZeroBlock;
    if (column < blocks) {
      const int64_t block = int64_t{source_row(job, row)} * blocks + column;
      if (!is_zero_block(job.codes + block * (kMxGroup / 2), kMxGroup / 2)) {
        value = layout::MxScale(job.scales[block], base);
      }
    }
    word |= layout::PlaceScale(WeightFormat::kMx, value, j);
  }
  return word;
}

__device__ uint32_t nv_scale_word(const PackJob& job, int row, int unit_k, int index) {
  const int blocks = job.matrix.k / kNvGroup;
  uint32_t word = 0;
  for (int j = 0; j < 4; ++j) {
    const int column = unit_k * 8 + index * 4 + j;
    const uint32_t byte =
        column < blocks ? job.scales[int64_t{source_row(job, row)} * blocks + column] : 0;
    word |= layout::PlaceScale(WeightFormat::kNv, layout::NvScale(byte & 0x7f), j);
  }
  return word;
}

// A block for each unit, after find_factors.
__global__ void __launch_bounds__(kThreads) pack_units(PackJob job) {
  const int unit_k = blockIdx.x;
  const int tile = blockIdx.y;
  uint8_t* unit = job.units + job.matrix.unit_offset(tile, unit_k);
  const auto store = [unit](int offset, uint32_t word) {
    *reinterpret_cast<uint32_t*>(unit + offset) = word;
  };
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 4; ++i) {
      if (!is_mine(job, i & 1)) continue;  // WordRow: odd words are the rows of half 1
      store(layout::CodeWordOffset(half, threadIdx.x, i), code_word(job, tile, unit_k, half, i));
    }
  }
  const int words = job.matrix.format == WeightFormat::kMx ? 1 : 2;  // of a row
  const int tile_row = threadIdx.x / 2;
  const int index = threadIdx.x % 2;
  if (index >= words || !is_mine(job, layout::RowHalf(tile_row))) return;
  const int row = tile * layout::kTileRows + tile_row;
  store(layout::ScaleWordOffset(job.matrix.format, tile_row, index),
        job.matrix.format == WeightFormat::kMx
            ? mx_scale_word(job, row, unit_k, job.bases[tile * 2 + layout::RowHalf(tile_row)])
            : nv_scale_word(job, row, unit_k, index));
}

constexpr size_t AlignUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The four arrays in order, each aligned; the bytes used are returned, so that null measures.
size_t LayOut(const LayerSpec& spec, int32_t num_slots, char* base, PackedLayer* layer) {
  size_t used = 0;
  const auto take = [&](int64_t bytes_a_slot) {
    char* array = base == nullptr ? nullptr : base + used;
    used += AlignUp(static_cast<size_t>(bytes_a_slot) * num_slots);
    return array;
  };
  const PackedMatrix fc1 = PackedFc1(spec);
  const PackedMatrix fc2 = PackedFc2(spec);
  layer->fc1_units = reinterpret_cast<uint8_t*>(take(fc1.slot_bytes()));
  layer->fc2_units = reinterpret_cast<uint8_t*>(take(fc2.slot_bytes()));
  layer->fc1_factors = reinterpret_cast<float*>(take(fc1.scales_per_slot() * 4));
  layer->fc2_factors = reinterpret_cast<float*>(take(fc2.scales_per_slot() * 4));
  return used;
}

}  // namespace

size_t PackedLayerBytes(const LayerSpec& spec, int32_t num_slots) {
  PackedLayer unused;
  return LayOut(spec, num_slots, nullptr, &unused);
}

PackedLayer SetPackedLayer(const LayerSpec& spec, int32_t num_slots, void* block) {
  PackedLayer layer;
  LayOut(spec, num_slots, static_cast<char*>(block), &layer);
  return layer;
}

size_t PackScratchBytes(const LayerSpec& spec) {
  const int tiles = std::max(PackedFc1(spec).num_tiles(), PackedFc2(spec).num_tiles());
  return static_cast<size_t>(tiles) * 2 * sizeof(int32_t);
}

absl::Status LaunchPack(const LayerSpec& spec, const PackedLayer& layer, int32_t slot,
                        Matrix matrix, const uint8_t* codes, const uint8_t* scales,
                        float second_level, void* scratch, cudaStream_t stream) {
  const bool down = matrix == Matrix::kDown;
  const PackedMatrix packed = down ? PackedFc2(spec) : PackedFc1(spec);
  const PackJob job = {
      .matrix = packed,
      .only_half = down                      ? -1
                   : matrix == Matrix::kGate ? 0
                                             : 1,
      .codes = codes,
      .scales = scales,
      .second_level = second_level,
      .units = (down ? layer.fc2_units : layer.fc1_units) + slot * packed.slot_bytes(),
      .factors = (down ? layer.fc2_factors : layer.fc1_factors) + slot * packed.scales_per_slot(),
      .bases = static_cast<int32_t*>(scratch),
  };
  find_factors<<<dim3(packed.num_tiles(), 2), kThreads, 0, stream>>>(job);
  pack_units<<<dim3(packed.num_units_k(), packed.num_tiles()), kThreads, 0, stream>>>(job);
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

}  // namespace expertd::cuda
