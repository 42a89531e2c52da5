#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/model_config.h"
#include "loader/checkpoint.h"
#include "loader/expert_table.h"
#include "loader/problems.h"
#include "loader/shard_index.h"

namespace expertd {

// Makes a Checkpoint from a directory: config, index, then one header after the other, so that only
// one shard's tensor list is in memory at a time. Private to checkpoint.cc.
class CheckpointBuilder {
 public:
  CheckpointBuilder(std::filesystem::path dir, const CheckpointOptions& options,
                    Problems* problems);

  Checkpoint Build();

 private:
  void ReadConfig();
  void ReadShards();
  bool HasEntry(const std::string& name) const;
  std::optional<std::string> ReadText(const std::string& name, uint64_t max_bytes);
  void ReadShard(int32_t file, const std::string& name);
  void CheckListed(const TensorInfo& tensor, int32_t file, const std::string& name);
  void CheckIndexComplete();

  const std::filesystem::path dir_;
  const CheckpointOptions options_;
  Problems* problems_;

  Checkpoint checkpoint_;
  std::optional<ModelConfig> config_;
  std::unique_ptr<ExpertTable> table_;

  std::optional<ShardIndex> index_;
  std::vector<bool> seen_;        // [index entries] found in the shard that is listed
  std::vector<bool> shard_read_;  // [files] its header is good
  struct Elsewhere {
    int64_t entry;  // of the index
    int32_t file;   // where the tensor was found, though listed in another
  };
  std::vector<Elsewhere> elsewhere_;
};

}  // namespace expertd
