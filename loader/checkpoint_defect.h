#pragma once

#include <string_view>
#include <vector>

namespace expertd {

// Ways to break a written checkpoint, one at a time, so that tests and people can see what is said
// about it. Where one tensor is broken it belongs to the first layer, the first written expert,
// matrix up.
enum class CheckpointDefect {
  kNone,
  // tensors
  kMissingWeight,
  kMissingScale,
  kMissingSecondLevel,  // NVFP4
  kMissingExpert,
  kMissingLayer,
  kWrongShape,
  kWrongDtype,
  // values
  kNanScale,
  kHugeScale,  // MXFP4
  kZeroSecondLevel,
  kNegativeSecondLevel,
  kNanSecondLevel,
  kInfiniteSecondLevel,
  // files
  kMissingShard,
  kTruncatedShard,
  kTrailingBytes,
  kHeaderTooLong,
  kTensorInTwoShards,
  // index.json
  kWrongShardInIndex,
  kPathTraversal,
  // config.json
  kConfigMissingKey,
  kConfigWrongType,
  kConfigAbsurdNumber,
  kConfigNotJson,
};

struct CheckpointDefectInfo {
  CheckpointDefect defect;
  std::string_view name;      // "missing-weight", as --break takes it
  std::string_view sentence;  // what is wrong
  bool needs_nvfp4 = false;
  bool needs_mxfp4 = false;
  bool needs_two_shards = false;
};
const std::vector<CheckpointDefectInfo>& CheckpointDefects();  // without kNone

}  // namespace expertd
