#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/model_config.h"
#include "config/model_spec.h"
#include "loader/checkpoint.h"
#include "loader/families/family.h"
#include "loader/problems.h"
#include "loader/safetensors.h"

namespace expertd {

// Takes every tensor of every shard, keeps the routed experts' of the layers to serve and checks
// them against config.json: names, types, shapes, and that none is missing. Reads no file.
class ExpertTable {
 public:
  // config: may be nullptr if it could not be read; then only the naming scheme is found.
  ExpertTable(const ModelConfig* config, const CheckpointOptions& options, Problems* problems);

  // Also says whether the tensor belongs to routed experts at all.
  bool Take(const TensorInfo& tensor, int32_t file, const std::string& file_name);

  // After the last Take: adds what is missing or contradictory to the problems. Not `complete`:
  // some shard could not be read, so that nothing can be called missing.
  void Finish(bool complete);

  const Family* scheme() const { return scheme_; }
  const std::string& prefix() const { return prefix_; }
  std::string FamilyText() const;  // "deepseek-v4 (nvfp4, mtp mxfp4)"; "unknown"
  int64_t ignored() const { return ignored_; }
  std::vector<LayerSpec> TakeLayers() { return std::move(layers_); }
  std::map<int32_t, std::vector<MatrixLocation>> TakeLocations() { return std::move(locations_); }
  std::vector<std::string> TakeNotes() { return std::move(notes_); }

 private:
  using Parts = std::array<FileRange, kNumExpertParts>;

  struct Layer {
    std::vector<Parts> matrices;  // [E * kNumMatrices]
    std::array<int64_t, kNumExpertParts> counts = {};
    int64_t foreign = 0;          // .weight tensors that are not FP4
    std::string foreign_example;  // "BF16 (tensor NAME in FILE, [64, 64])"
    Problems problems;            // of single tensors; told only if the layer is FP4 at all
  };

  void TakeExpert(const ExpertTensorName& name, const TensorInfo& tensor, int32_t file,
                  const std::string& file_name);
  int32_t LayerNumber(const ExpertTensorName& name) const;
  void CheckTensor(const ExpertTensorName& name, const TensorInfo& tensor, const std::string& where,
                   Layer* layer) const;
  void FinishLayer(int32_t number, bool complete, Layer* layer);
  void ListMissing(int32_t number, Recipe recipe, const Layer& layer);
  void CheckScheme();
  void CheckRange();
  void CheckLayerNumbers(bool complete);
  bool ExplainNotFp4();
  LayerSpec SpecOf(int32_t number, Recipe recipe) const;
  std::string NameOf(int32_t number, int32_t expert, Matrix matrix, ExpertPart part) const;
  bool IsMtp(int32_t number) const { return number >= config_->num_hidden_layers; }

  const ModelConfig* config_;
  const CheckpointOptions options_;
  Problems* problems_;
  std::vector<bool> needed_expert_;  // [E]; empty = all

  const Family* scheme_ = nullptr;
  std::string scheme_example_;  // the tensor that told
  std::string prefix_;
  const RefusedFamily* refused_ = nullptr;
  std::string unknown_example_;  // an expert tensor of no scheme we know
  int64_t ignored_ = 0;
  std::map<int32_t, Layer> found_;

  std::vector<LayerSpec> layers_;
  std::map<int32_t, std::vector<MatrixLocation>> locations_;
  std::vector<std::string> notes_;
};

// Whether a tensor belongs to routed experts of any scheme, served or not.
bool NamesExperts(std::string_view tensor);

// "0, 2-5, 9"; numbers ascending.
std::string RangesText(const std::vector<int32_t>& numbers);

}  // namespace expertd
