#include "loader/checkpoint_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "config/check.h"
#include "config/limits.h"
#include "loader/checkpoint_content.h"

namespace expertd {
namespace {

constexpr Matrix kMatrices[] = {Matrix::kGate, Matrix::kUp, Matrix::kDown};

absl::Status OutOfRange(std::string_view field, int64_t found, int64_t min, int64_t max) {
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(field), ": got ", found, ", expected ", min, "..", max));
}

absl::Status CheckSize(std::string_view field, int64_t size, int64_t max) {
  if (size < limits::kGeometryMultiple || size > max || size % limits::kGeometryMultiple != 0) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(field), ": got ", size,
                                                   ", expected a multiple of ",
                                                   limits::kGeometryMultiple, " up to ", max));
  }
  return absl::OkStatus();
}

// Ascending numbers, each in [0, end).
absl::Status CheckList(std::string_view field, const std::vector<int32_t>& list, int32_t end) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] < 0 || list[i] >= end) return OutOfRange(field, list[i], 0, end - 1);
    if (i > 0 && list[i] <= list[i - 1]) {
      return absl::InvalidArgumentError(absl::StrCat(
          std::string(field), ": got ", list[i], " after ", list[i - 1], ", expected ascending"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGeometry(const CheckpointRequest& request) {
  auto status = CheckSize("hidden size", request.hidden_size, limits::kMaxHiddenSize);
  if (!status.ok()) return status;
  status = CheckSize("intermediate size", request.intermediate_size, limits::kMaxIntermediateSize);
  if (!status.ok()) return status;
  if (request.num_experts < 1 || request.num_experts > limits::kMaxExperts) {
    return OutOfRange("experts", request.num_experts, 1, limits::kMaxExperts);
  }
  const int32_t max_top_k = std::min(limits::kMaxTopK, request.num_experts);
  if (request.top_k < 1 || request.top_k > max_top_k) {
    return OutOfRange("top-k", request.top_k, 1, max_top_k);
  }
  if (request.num_hidden_layers < 1 || request.num_hidden_layers > limits::kMaxLayers) {
    return OutOfRange("hidden layers", request.num_hidden_layers, 1, limits::kMaxLayers);
  }
  const int32_t max_mtp = limits::kMaxLayers - request.num_hidden_layers;
  if (request.num_mtp_layers < 0 || request.num_mtp_layers > max_mtp) {
    return OutOfRange("mtp layers", request.num_mtp_layers, 0, max_mtp);
  }
  if (request.layers.empty() && request.num_mtp_layers == 0) {
    return absl::InvalidArgumentError("layers: got none, expected at least one");
  }
  status = CheckList("layers", request.layers, request.num_hidden_layers);
  if (!status.ok()) return status;
  return CheckList("experts", request.experts, request.num_experts);
}

absl::Status CheckDefect(const CheckpointRequest& request) {
  for (const CheckpointDefectInfo& info : CheckpointDefects()) {
    if (info.defect != request.defect) continue;
    const std::string name(info.name);
    if (info.needs_nvfp4 && (request.recipe != Recipe::kNvfp4 || request.layers.empty())) {
      return absl::InvalidArgumentError(
          absl::StrCat("break ", name, ": got recipe mxfp4, expected nvfp4"));
    }
    if (info.needs_mxfp4 && request.recipe != Recipe::kMxfp4) {
      return absl::InvalidArgumentError(
          absl::StrCat("break ", name, ": got recipe nvfp4, expected mxfp4"));
    }
  }
  return absl::OkStatus();
}

// Names of one expert's matrix in the family, and of a layer's router.
class Naming {
 public:
  explicit Naming(const CheckpointRequest& request) : request_(request) {}

  std::string MatrixStem(int32_t layer, int32_t expert, Matrix matrix) const {
    static constexpr const char* kDeepSeek[] = {"w1", "w3", "w2"};
    static constexpr const char* kQwen[] = {"gate_proj", "up_proj", "down_proj"};
    const bool qwen = request_.style == CheckpointStyle::kQwen3;
    return absl::StrCat(LayerPrefix(layer), "experts.", expert, ".",
                        (qwen ? kQwen : kDeepSeek)[static_cast<int>(matrix)]);
  }
  std::string Router(int32_t layer) const { return LayerPrefix(layer) + "gate.weight"; }

 private:
  std::string LayerPrefix(int32_t layer) const {
    if (request_.style == CheckpointStyle::kQwen3) {
      return absl::StrCat("model.layers.", layer, ".mlp.");
    }
    if (layer >= request_.num_hidden_layers) {
      return absl::StrCat("mtp.", layer - request_.num_hidden_layers, ".ffn.");
    }
    return absl::StrCat("layers.", layer, ".ffn.");
  }

  const CheckpointRequest& request_;
};

void AddMatrix(const CheckpointRequest& request, int32_t layer, int32_t expert, Matrix matrix,
               std::vector<PlannedTensor>* tensors) {
  const Recipe recipe =
      layer >= request.num_hidden_layers ? Recipe::kMxfp4 : request.recipe;  // mtp
  const MatrixShape shape = ShapeIn(request, matrix);
  const std::string stem = Naming(request).MatrixStem(layer, expert, matrix);
  const auto add = [&](const char* suffix, const char* dtype, std::vector<int64_t> dims,
                       int64_t bytes, TensorContent content) {
    PlannedTensor tensor;
    tensor.name = stem + suffix;
    tensor.dtype = dtype;
    tensor.shape = std::move(dims);
    tensor.bytes = static_cast<uint64_t>(bytes);
    tensor.content = content;
    tensor.layer = layer;
    tensor.expert = expert;
    tensor.matrix = matrix;
    tensor.recipe = recipe;
    tensors->push_back(std::move(tensor));
  };
  const bool mx = recipe == Recipe::kMxfp4;
  add(".weight", mx ? "I8" : "U8", {shape.out, shape.in / 2}, shape.CodeBytes(),
      TensorContent::kCodes);
  add(mx ? ".scale" : ".weight_scale", mx ? "F8_E8M0" : "F8_E4M3",
      {shape.out, shape.in / ScaleGroup(recipe)}, shape.ScaleBytes(recipe), TensorContent::kScales);
  if (mx) return;
  add(".weight_scale_2", "F32", {}, 4, TensorContent::kSecondLevel);
  add(".input_scale", "F32", {}, 4, TensorContent::kInputScale);
}

void AddLayer(const CheckpointRequest& request, int32_t layer,
              std::vector<PlannedTensor>* tensors) {
  // The router belongs to the caller: a loader must ignore it.
  PlannedTensor router;
  router.name = Naming(request).Router(layer);
  router.dtype = "BF16";
  router.shape = {request.num_experts, request.hidden_size};
  router.bytes = static_cast<uint64_t>(2 * request.num_experts * request.hidden_size);
  router.layer = layer;
  tensors->push_back(std::move(router));
  const int32_t num_experts =
      request.experts.empty() ? request.num_experts : static_cast<int32_t>(request.experts.size());
  for (int32_t i = 0; i < num_experts; ++i) {
    const int32_t expert = request.experts.empty() ? i : request.experts[i];
    for (const Matrix matrix : kMatrices) AddMatrix(request, layer, expert, matrix, tensors);
  }
}

// A float written over the whole tensor.
void PatchFloat(float value, PlannedTensor* tensor) {
  tensor->patch.assign(sizeof value, '\0');
  std::memcpy(tensor->patch.data(), &value, sizeof value);
}

// Changes the scale of the first block of row 0 that is not zero.
void PatchScale(const CheckpointRequest& request, uint8_t byte, PlannedTensor* tensor) {
  const RandomMatrix matrix(request.seed, tensor->layer, tensor->expert, tensor->matrix,
                            ShapeIn(request, tensor->matrix), tensor->recipe,
                            request.power_of_two_scales);
  std::vector<uint8_t> scales(static_cast<size_t>(tensor->shape[1]));
  matrix.FillScales(0, absl::MakeSpan(scales));
  const auto first = std::find_if(scales.begin(), scales.end(), [](uint8_t s) { return s != 0; });
  EXPERTD_CHECK(first != scales.end());
  tensor->patch.assign(1, static_cast<char>(byte));
  tensor->patch_offset = static_cast<uint64_t>(first - scales.begin());
}

// The tensor of the victim's matrix that holds `content`.
PlannedTensor* PartOf(std::vector<PlannedTensor>* tensors, const PlannedTensor& victim,
                      TensorContent content) {
  const auto found = std::find_if(tensors->begin(), tensors->end(), [&](const PlannedTensor& t) {
    return t.content == content && t.layer == victim.layer && t.expert == victim.expert &&
           t.matrix == victim.matrix;
  });
  EXPERTD_CHECK(found != tensors->end());  // CheckDefect has seen to the recipe
  return &*found;
}

// Defects that leave tensors out. victim: the codes of the broken matrix.
void RemoveTensors(CheckpointDefect defect, const PlannedTensor& victim,
                   std::vector<PlannedTensor>* tensors) {
  using D = CheckpointDefect;
  std::erase_if(*tensors, [defect, layer = victim.layer, expert = victim.expert,
                           matrix = victim.matrix](const PlannedTensor& t) {
    if (t.content == TensorContent::kOtherModule || t.layer != layer) return false;
    if (defect == D::kMissingLayer) return true;
    if (t.expert != expert) return false;
    if (defect == D::kMissingExpert) return true;
    if (t.matrix != matrix) return false;
    return (defect == D::kMissingWeight && t.content == TensorContent::kCodes) ||
           (defect == D::kMissingScale && t.content == TensorContent::kScales) ||
           (defect == D::kMissingSecondLevel && t.content == TensorContent::kSecondLevel);
  });
}

// Applies what is wrong with tensors and their values; defects of files and json change nothing
// here.
void BreakTensors(const CheckpointRequest& request, std::vector<PlannedTensor>* tensors) {
  using D = CheckpointDefect;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  PlannedTensor& codes =
      *std::find_if(tensors->begin(), tensors->end(), [](const PlannedTensor& t) {
        return t.content == TensorContent::kCodes && t.matrix == Matrix::kUp;
      });
  const auto part = [&](TensorContent content) { return PartOf(tensors, codes, content); };
  switch (request.defect) {
    case D::kWrongShape:
      codes.shape[0] -= 1;
      codes.bytes -= static_cast<uint64_t>(codes.shape[1]);
      return;
    case D::kWrongDtype:
      codes.dtype = "F8_E4M3";
      return;
    case D::kNanScale:
      return PatchScale(request, codes.recipe == Recipe::kMxfp4 ? 0xff : 0x7f,
                        part(TensorContent::kScales));
    case D::kHugeScale:
      return PatchScale(request, 0xfe, part(TensorContent::kScales));
    case D::kZeroSecondLevel:
      return PatchFloat(0.0f, part(TensorContent::kSecondLevel));
    case D::kNegativeSecondLevel:
      return PatchFloat(-0.01f, part(TensorContent::kSecondLevel));
    case D::kNanSecondLevel:
      return PatchFloat(kNan, part(TensorContent::kSecondLevel));
    case D::kInfiniteSecondLevel:
      return PatchFloat(kInfinity, part(TensorContent::kSecondLevel));
    case D::kMissingWeight:
    case D::kMissingScale:
    case D::kMissingSecondLevel:
    case D::kMissingExpert:
    case D::kMissingLayer:
      return RemoveTensors(request.defect, PlannedTensor(codes), tensors);
    default:
      return;
  }
}

}  // namespace

MatrixShape ShapeIn(const CheckpointRequest& request, Matrix matrix) {
  LayerSpec spec;
  spec.hidden_size = request.hidden_size;
  spec.intermediate_size = request.intermediate_size;
  return ShapeOf(spec, matrix);
}

std::string CheckpointPlan::ShardName(size_t shard) const {
  return absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, shards.size());
}

uint64_t CheckpointPlan::TensorBytes() const {
  uint64_t bytes = 0;
  for (const auto& shard : shards) {
    for (const PlannedTensor& tensor : shard) bytes += tensor.bytes;
  }
  return bytes;
}

absl::Status CheckRequest(const CheckpointRequest& request) {
  if (auto status = CheckGeometry(request); !status.ok()) return status;
  if (request.style == CheckpointStyle::kQwen3) {
    if (request.recipe != Recipe::kNvfp4) {
      return absl::InvalidArgumentError("recipe: got mxfp4 with style qwen3, expected nvfp4");
    }
    if (request.num_mtp_layers != 0) {
      return OutOfRange("mtp layers with style qwen3", request.num_mtp_layers, 0, 0);
    }
  }
  if (!(request.swiglu_limit >= 0 && request.swiglu_limit <= 1e6f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("swiglu limit: got ", request.swiglu_limit, ", expected 0..1e6"));
  }
  if (request.shard_bytes == 0) return absl::InvalidArgumentError("shard size: got 0 bytes");
  return CheckDefect(request);
}

CheckpointPlan PlanCheckpoint(const CheckpointRequest& request) {
  std::vector<PlannedTensor> tensors;
  for (const int32_t layer : request.layers) AddLayer(request, layer, &tensors);
  for (int32_t n = 0; n < request.num_mtp_layers; ++n) {
    AddLayer(request, request.num_hidden_layers + n, &tensors);
  }
  if (request.defect != CheckpointDefect::kNone) BreakTensors(request, &tensors);

  CheckpointPlan plan;
  uint64_t shard_bytes = request.shard_bytes;  // the first tensor opens the first shard
  for (PlannedTensor& tensor : tensors) {
    if (shard_bytes >= request.shard_bytes) {
      plan.shards.emplace_back();
      shard_bytes = 0;
    }
    shard_bytes += tensor.bytes;
    plan.shards.back().push_back(std::move(tensor));
  }
  if (request.defect == CheckpointDefect::kTensorInTwoShards && plan.shards.size() > 1) {
    plan.shards.back().push_back(plan.shards.front().back());
  }
  return plan;
}

}  // namespace expertd
