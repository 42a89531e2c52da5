#include "loader/checkpoint_defect.h"

namespace expertd {

const std::vector<CheckpointDefectInfo>& CheckpointDefects() {
  using D = CheckpointDefect;
  static const std::vector<CheckpointDefectInfo> defects = [] {
    std::vector<CheckpointDefectInfo> list = {
        {D::kMissingWeight, "missing-weight", "the codes of one matrix are not there"},
        {D::kMissingScale, "missing-scale", "the block scales of one matrix are not there"},
        {D::kMissingSecondLevel, "missing-second-level",
         "the second-level scale of one matrix is not there"},
        {D::kMissingExpert, "missing-expert", "one expert is not there"},
        {D::kMissingLayer, "missing-layer", "one layer is not there"},
        {D::kWrongShape, "wrong-shape", "the codes of one matrix lack their last row"},
        {D::kWrongDtype, "wrong-dtype", "the codes of one matrix are declared as F8_E4M3"},
        {D::kNanScale, "nan-scale", "one block scale is NaN"},
        {D::kHugeScale, "huge-scale", "one block scale is 2^127"},
        {D::kZeroSecondLevel, "zero-second-level", "one second-level scale is 0"},
        {D::kNegativeSecondLevel, "negative-second-level", "one second-level scale is negative"},
        {D::kNanSecondLevel, "nan-second-level", "one second-level scale is NaN"},
        {D::kInfiniteSecondLevel, "infinite-second-level", "one second-level scale is infinite"},
        {D::kMissingShard, "missing-shard", "the last shard is listed but not there"},
        {D::kTruncatedShard, "truncated-shard", "the last shard lacks its last byte"},
        {D::kTrailingBytes, "trailing-bytes", "the last shard has a byte after its last tensor"},
        {D::kHeaderTooLong, "header-too-long",
         "the last shard's header claims to be longer than the format allows"},
        {D::kTensorInTwoShards, "tensor-in-two-shards",
         "a tensor of the first shard is in the last one too"},
        {D::kWrongShardInIndex, "wrong-shard-in-index",
         "the index lists a tensor of the first shard in the last one"},
        {D::kPathTraversal, "path-traversal", "the index names a file outside the directory"},
        {D::kConfigMissingKey, "config-missing-key", "config.json has no hidden_size"},
        {D::kConfigWrongType, "config-wrong-type", "hidden_size in config.json is a string"},
        {D::kConfigAbsurdNumber, "config-absurd-number",
         "moe_intermediate_size in config.json is 10^15"},
        {D::kConfigNotJson, "config-not-json", "config.json ends in the middle"},
    };
    for (CheckpointDefectInfo& info : list) {
      info.needs_nvfp4 = info.name.find("second-level") != std::string_view::npos;
      info.needs_mxfp4 = info.defect == D::kHugeScale;
      info.needs_two_shards =
          info.defect == D::kTensorInTwoShards || info.defect == D::kWrongShardInIndex;
    }
    return list;
  }();
  return defects;
}

}  // namespace expertd
