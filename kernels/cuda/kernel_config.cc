#include "kernels/cuda/kernel_config.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "config/limits.h"
#include "kernels/cuda/moe_layer/traits.h"

namespace expertd::cuda {
namespace {

using moe_layer::HasWidth;
using moe_layer::kMaxSlots;
using moe_layer::kMaxStages;
using moe_layer::MaxTokenTile;

constexpr int kMinStages = 3;  // fewer lose a third of the bandwidth
constexpr int kMinTokenTile = 16;

int SharedBytes(const LayerShape& layer, int token_tile, int stages) {
  const int tables = 2 * (layer.num_slots + 1) * static_cast<int>(sizeof(uint32_t));
  return moe_layer::kStateBytes + tables +
         stages *
             (moe_layer::WeightStageBytes(layer.format) + moe_layer::TokenStageBytes(token_tile));
}

int StagesThatFit(const LayerShape& layer, int token_tile) {
  int stages = kMaxStages;
  while (stages > 0 && SharedBytes(layer, token_tile, stages) > kMaxSharedBytes) --stages;
  return stages;
}

// Routes of a busy slot when tokens choose experts evenly: the mean plus two deviations. A slot
// with more is cut into several token tiles.
double BusySlot(const LayerShape& layer, int32_t tokens, int32_t top_k) {
  const double mean =
      static_cast<double>(tokens) * top_k * layer.num_ranks / std::max(1, layer.num_experts);
  return mean + 2.0 * std::sqrt(mean);
}

absl::Status CheckMultiple(const char* field, int64_t found) {
  if (found > 0 && found % limits::kCudaGeometryMultiple == 0 && found <= limits::kMaxHiddenSize)
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      field, ": found ", found, ", expected a multiple of ", limits::kCudaGeometryMultiple,
      " up to ", limits::kMaxHiddenSize, " for the CUDA kernel"));
}

}  // namespace

std::string KernelConfig::ToString() const {
  return absl::StrCat("token tile ", token_tile, ", ", num_stages, " stages, ", num_ctas, " CTAs, ",
                      near_routes, " near routes, ", shared_bytes, " bytes of shared memory");
}

absl::Status CheckLayerShape(const LayerShape& layer) {
  if (auto status = CheckMultiple("hidden_size", layer.hidden); !status.ok()) return status;
  if (auto status = CheckMultiple("intermediate_size", layer.intermediate); !status.ok())
    return status;
  if (layer.num_slots < 1 || layer.num_slots > kMaxSlots) {
    return absl::InvalidArgumentError(absl::StrCat("expert slots of a rank: found ",
                                                   layer.num_slots, ", expected 1 to ", kMaxSlots));
  }
  return absl::OkStatus();
}

absl::StatusOr<KernelConfig> ChooseKernelConfig(const LayerShape& layer, int32_t tokens,
                                                int32_t top_k, int32_t num_sms) {
  if (auto status = CheckLayerShape(layer); !status.ok()) return status;
  if (top_k < 1 || top_k > limits::kMaxTopK) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k: found ", top_k, ", expected 1 to ", limits::kMaxTopK));
  }
  if (tokens < 0 || tokens > limits::kMaxTokensPerRank) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens: found ", tokens, ", expected 0 to ", limits::kMaxTokensPerRank));
  }
  const int busy = static_cast<int>(std::ceil(std::min(BusySlot(layer, tokens, top_k), 1e6)));
  KernelConfig config;
  config.token_tile = std::clamp((busy + 7) / 8 * 8, kMinTokenTile, MaxTokenTile(layer.format));
  while (!HasWidth(layer.format, config.token_tile)) config.token_tile += 8;
  while (!HasWidth(layer.format, config.token_tile) ||
         StagesThatFit(layer, config.token_tile) < kMinStages) {
    config.token_tile -= 8;
  }
  config.num_stages = StagesThatFit(layer, config.token_tile);
  config.num_ctas = std::min(num_sms, layout::kMaxCtas);
  const int shared_bytes = SharedBytes(layer, config.token_tile, config.num_stages);
  config.near_routes = std::min(layout::kOwnSortRoutes,
                                (kMaxSharedBytes - shared_bytes) / moe_layer::kNearRouteBytes);
  config.shared_bytes = shared_bytes + config.near_routes * moe_layer::kNearRouteBytes;
  return config;
}

absl::Status CheckDevice(int major, int minor, int64_t shared_bytes_per_block) {
  if (major != 9 || minor != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("compute capability: found ", major, ".", minor, ", expected 9.0 (Hopper)"));
  }
  if (shared_bytes_per_block < kMaxSharedBytes) {
    return absl::InvalidArgumentError(absl::StrCat("shared memory per block: found ",
                                                   shared_bytes_per_block, ", expected at least ",
                                                   kMaxSharedBytes));
  }
  return absl::OkStatus();
}

}  // namespace expertd::cuda
