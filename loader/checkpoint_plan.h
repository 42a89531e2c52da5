#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "loader/checkpoint_writer.h"

namespace expertd {

// What the bytes of a planned tensor are.
enum class TensorContent { kCodes, kScales, kSecondLevel, kInputScale, kOtherModule };

struct PlannedTensor {
  std::string name;
  std::string dtype;  // as safetensors writes it
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  TensorContent content = TensorContent::kOtherModule;
  int32_t layer = 0;  // mtp layers after the others
  int32_t expert = 0;
  Matrix matrix = Matrix::kGate;
  Recipe recipe = Recipe::kMxfp4;
  std::string patch;  // written over the content from its patch_offset; broken variants only
  uint64_t patch_offset = 0;
};

// A checkpoint before any byte is written: shards in order, tensors in file order. Plain data.
struct CheckpointPlan {
  std::vector<std::vector<PlannedTensor>> shards;

  std::string ShardName(size_t shard) const;  // model-00001-of-00004.safetensors
  uint64_t TensorBytes() const;
};

// INVALID_ARGUMENT with field, found, expected if the request cannot be written.
absl::Status CheckRequest(const CheckpointRequest& request);

// Needs a checked request. Tensor defects are applied, those of files and json are not.
CheckpointPlan PlanCheckpoint(const CheckpointRequest& request);

MatrixShape ShapeIn(const CheckpointRequest& request, Matrix matrix);

// Text of the json files of the family: {file name, content}.
std::vector<std::pair<std::string, std::string>> ConfigFiles(const CheckpointRequest& request);
std::string IndexJson(const CheckpointRequest& request, const CheckpointPlan& plan);

}  // namespace expertd
