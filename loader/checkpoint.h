#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/model_spec.h"
#include "loader/families/family.h"
#include "loader/file.h"
#include "loader/problems.h"

namespace expertd {

struct CheckpointOptions {
  bool allow_symlinks = false;  // links that leave the directory (and are not a Hugging Face cache)
  int32_t first_layer = 0;      // serve the MoE layers first..last only
  int32_t last_layer = -1;      // -1 = to the end
  std::vector<int32_t> experts;  // only these must be there, e.g. one rank's; empty = all
};

// A byte range of one shard.
struct FileRange {
  int32_t file = -1;    // index into Checkpoint::files()
  uint64_t offset = 0;  // from the start of the file
  uint64_t bytes = 0;
};

// Where one matrix of one expert lies, checked against the geometry.
struct MatrixLocation {
  FileRange codes;         // [out, in/2]
  FileRange scales;        // [out, in/group]
  FileRange second_level;  // NVFP4: one F32; file = -1 for MXFP4
  FileRange input_scale;   // NVFP4: one F32, reported and never used; file = -1 if there is none
};

struct CheckpointFile {
  std::filesystem::path path;
  FileIdentity identity;  // a file that is another one during the load is an error
};

// A directory of safetensors shards whose headers and config were read and checked; no weight byte
// is read. Immutable, freely shared between threads.
class Checkpoint {
 public:
  // INVALID_ARGUMENT / NOT_FOUND with everything wrong at once, one problem a line.
  static absl::StatusOr<Checkpoint> Open(const std::filesystem::path& dir,
                                         const CheckpointOptions& options = {});

  // What can be said of the directory even if it cannot be served. To be loaded only if `problems`
  // stays empty.
  static Checkpoint Examine(const std::filesystem::path& dir, const CheckpointOptions& options,
                            Problems* problems);

  // The directory's name; for a Hugging Face cache the repository's.
  const std::string& model_name() const { return model_name_; }
  const std::string& family() const { return family_; }             // e.g. "deepseek-v4 (mxfp4)"
  const std::vector<LayerSpec>& layers() const { return layers_; }  // served, ascending
  const std::vector<CheckpointFile>& files() const { return files_; }
  int64_t ignored_tensors() const { return ignored_tensors_; }      // of other modules
  int32_t num_hidden_layers() const { return num_hidden_layers_; }  // 0 if the config is broken
  // What a reader should know and what stops nothing: layers that are not served, and why.
  const std::vector<std::string>& notes() const { return notes_; }

  // The layer must be one of layers(), 0 <= expert < E and one of CheckpointOptions::experts.
  const MatrixLocation& Locate(int32_t layer, int32_t expert, Matrix matrix) const;

  // Human sentence for ranges of Locate: "tensor NAME in FILE".
  std::string Describe(int32_t layer, int32_t expert, Matrix matrix) const;
  std::string Describe(int32_t layer, int32_t expert, Matrix matrix, ExpertPart part) const;

 private:
  friend class CheckpointBuilder;
  Checkpoint() = default;

  std::string model_name_;
  std::string family_;
  std::vector<LayerSpec> layers_;
  std::vector<CheckpointFile> files_;
  int64_t ignored_tensors_ = 0;
  int32_t num_hidden_layers_ = 0;
  std::vector<std::string> notes_;
  std::map<int32_t, std::vector<MatrixLocation>> locations_;  // layer -> [E * kNumMatrices]
  const Family* scheme_ = nullptr;                            // composes the tensors' names
  std::string prefix_;                                        // of the names
};

}  // namespace expertd
