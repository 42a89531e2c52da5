#include "loader/checkpoint.h"

#include <algorithm>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "config/check.h"
#include "config/limits.h"
#include "loader/checkpoint_builder.h"
#include "loader/file.h"
#include "loader/link_rules.h"
#include "loader/safetensors.h"
#include "loader/text.h"

namespace expertd {
namespace {

namespace fs = std::filesystem;

constexpr char kConfigName[] = "config.json";
constexpr char kQuantConfigName[] = "hf_quant_config.json";
constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";

// A message without its code, the file's name before it.
std::string At(const std::string& file, const absl::Status& status) {
  return absl::StrCat(file, ": ", std::string(status.message()));
}

// models--ORG--NAME -> NAME for a Hugging Face cache, else the directory's own name.
std::string ModelName(const fs::path& dir) {
  const fs::path repository = HuggingFaceRepository(dir);
  if (!repository.empty()) {
    const std::string name = repository.filename().string();
    const size_t at = name.rfind("--");
    if (name.starts_with("models--")) return name.substr(at + 2);
  }
  std::error_code error;
  const fs::path absolute = fs::absolute(dir, error).lexically_normal();
  return absolute.has_filename() ? absolute.filename().string()
                                 : absolute.parent_path().filename().string();
}

}  // namespace

CheckpointBuilder::CheckpointBuilder(fs::path dir, const CheckpointOptions& options,
                                     Problems* problems)
    : dir_(std::move(dir)), options_(options), problems_(problems) {}

Checkpoint CheckpointBuilder::Build() {
  checkpoint_.model_name_ = ModelName(dir_);
  ReadConfig();
  table_ = std::make_unique<ExpertTable>(config_ ? &*config_ : nullptr, options_, problems_);
  const int64_t problems_before = problems_->count();
  ReadShards();
  // What a broken shard holds is unknown: to call it missing as well would mislead.
  table_->Finish(/*complete=*/problems_->count() == problems_before);

  checkpoint_.family_ = table_->FamilyText();
  checkpoint_.layers_ = table_->TakeLayers();
  checkpoint_.locations_ = table_->TakeLocations();
  checkpoint_.notes_ = table_->TakeNotes();
  checkpoint_.ignored_tensors_ = table_->ignored();
  checkpoint_.num_hidden_layers_ = config_ ? config_->num_hidden_layers : 0;
  checkpoint_.scheme_ = table_->scheme();
  checkpoint_.prefix_ = table_->prefix();
  return std::move(checkpoint_);
}

// Also a link that leads nowhere: what is there but cannot be read is a problem, not an absence.
bool CheckpointBuilder::HasEntry(const std::string& name) const {
  std::error_code error;
  return fs::exists(fs::symlink_status(dir_ / name, error));
}

std::optional<std::string> CheckpointBuilder::ReadText(const std::string& name,
                                                       uint64_t max_bytes) {
  const absl::Status link = CheckFileLink(dir_, name, options_.allow_symlinks);
  if (!link.ok()) {
    problems_->Add(std::string(link.message()));
    return std::nullopt;
  }
  absl::StatusOr<std::string> text = ReadSmallFile(dir_ / name, max_bytes);
  if (!text.ok()) {
    problems_->Add(std::string(text.status().message()));
    return std::nullopt;
  }
  return *std::move(text);
}

void CheckpointBuilder::ReadConfig() {
  const std::optional<std::string> config = ReadText(kConfigName, limits::kMaxJsonConfigBytes);
  std::optional<std::string> quant;
  if (HasEntry(kQuantConfigName)) quant = ReadText(kQuantConfigName, limits::kMaxJsonConfigBytes);
  if (!config) return;
  absl::StatusOr<ModelConfig> parsed = ParseModelConfig(*config, quant.value_or(""));
  if (parsed.ok()) {
    config_ = *std::move(parsed);
    return;
  }
  for (const absl::string_view line : absl::StrSplit(parsed.status().message(), '\n')) {
    problems_->Add(std::string(line));
  }
}

void CheckpointBuilder::ReadShards() {
  std::vector<std::string> names;
  if (HasEntry(kIndexName)) {
    const std::optional<std::string> text = ReadText(kIndexName, limits::kMaxShardIndexBytes);
    if (!text) return;
    absl::StatusOr<ShardIndex> index = ParseShardIndex(*text);
    if (!index.ok()) {
      problems_->Add(At(kIndexName, index.status()));
      return;
    }
    index_ = *std::move(index);
    seen_.resize(index_->entries.size());
    names = index_->files;
  } else if (HasEntry(kSingleName)) {
    names = {kSingleName};
  } else {
    problems_->Add(absl::StrCat("found neither ", kIndexName, " nor ", kSingleName,
                                ", expected one of them in ", dir_.string()));
    return;
  }
  shard_read_.resize(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    checkpoint_.files_.push_back({.path = dir_ / names[i]});
    ReadShard(static_cast<int32_t>(i), names[i]);
  }
  CheckIndexComplete();
}

void CheckpointBuilder::ReadShard(int32_t file, const std::string& name) {
  const absl::Status link = CheckFileLink(dir_, name, options_.allow_symlinks);
  if (!link.ok()) {
    problems_->Add(std::string(link.message()));
    return;
  }
  const absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(dir_ / name);
  if (!header.ok()) {
    problems_->Add(At(name, header.status()));
    return;
  }
  checkpoint_.files_[static_cast<size_t>(file)].identity = header->identity;
  shard_read_[static_cast<size_t>(file)] = true;
  for (const TensorInfo& tensor : header->tensors) {
    CheckListed(tensor, file, name);
    table_->Take(tensor, file, name);
  }
}

void CheckpointBuilder::CheckListed(const TensorInfo& tensor, int32_t file,
                                    const std::string& name) {
  if (!index_) return;
  const int64_t entry = index_->Find(tensor.name);
  if (entry < 0) {
    // Stray tensors of other modules are nobody's harm.
    if (!NamesExperts(tensor.name)) return;
    problems_->Add(absl::StrCat("tensor ", Printable(tensor.name), " in ", name,
                                ": not listed, expected an entry in ", kIndexName));
  } else if (index_->entries[static_cast<size_t>(entry)].file != file) {
    elsewhere_.push_back({entry, file});
  } else {
    seen_[static_cast<size_t>(entry)] = true;
  }
}

void CheckpointBuilder::CheckIndexComplete() {
  if (!index_) return;
  std::vector<bool> told(seen_.size());
  for (const auto& [entry, file] : elsewhere_) {
    const auto at = static_cast<size_t>(entry);
    const std::string& listed = index_->files[static_cast<size_t>(index_->entries[at].file)];
    const std::string& found = index_->files[static_cast<size_t>(file)];
    told[at] = true;
    problems_->Add(absl::StrCat("tensor ", Printable(index_->entries[at].tensor), ": found in ",
                                seen_[at] ? absl::StrCat(listed, " and ", found) : found,
                                ", expected only in ", listed, " as ", kIndexName, " lists it"));
  }
  for (size_t i = 0; i < seen_.size(); ++i) {
    const auto file = static_cast<size_t>(index_->entries[i].file);
    if (seen_[i] || told[i] || !shard_read_[file]) continue;
    problems_->Add(absl::StrCat("tensor ", Printable(index_->entries[i].tensor),
                                ": not found, expected in ", index_->files[file], " as ",
                                kIndexName, " lists it"));
  }
}

Checkpoint Checkpoint::Examine(const fs::path& dir, const CheckpointOptions& options,
                               Problems* problems) {
  std::error_code error;
  if (!fs::is_directory(dir, error)) {
    problems->Add(absl::StrCat(dir.string(), ": found no directory, expected one with ",
                               kConfigName, " and safetensors files"));
    Checkpoint nothing;
    nothing.model_name_ = ModelName(dir);
    nothing.family_ = "unknown";
    return nothing;
  }
  return CheckpointBuilder(dir, options, problems).Build();
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const fs::path& dir, const CheckpointOptions& options) {
  Problems problems;
  Checkpoint checkpoint = Examine(dir, options, &problems);
  if (problems.empty()) return checkpoint;
  std::error_code error;
  if (!fs::is_directory(dir, error)) return absl::NotFoundError(problems.lines().front());
  return problems.ToStatus(dir.string());
}

const MatrixLocation& Checkpoint::Locate(int32_t layer, int32_t expert, Matrix matrix) const {
  const auto it = locations_.find(layer);
  EXPERTD_CHECK(it != locations_.end() && expert >= 0);
  const size_t at = static_cast<size_t>(expert) * kNumMatrices + static_cast<size_t>(matrix);
  EXPERTD_CHECK(at < it->second.size());
  return it->second[at];
}

std::string Checkpoint::Describe(int32_t layer, int32_t expert, Matrix matrix) const {
  return Describe(layer, expert, matrix, ExpertPart::kCodes);
}

std::string Checkpoint::Describe(int32_t layer, int32_t expert, Matrix matrix,
                                 ExpertPart part) const {
  const MatrixLocation& location = Locate(layer, expert, matrix);
  const FileRange& range = part == ExpertPart::kCodes         ? location.codes
                           : part == ExpertPart::kSecondLevel ? location.second_level
                           : part == ExpertPart::kInputScale  ? location.input_scale
                                                              : location.scales;
  const bool mtp = scheme_ == &DeepSeekV4Family() && layer >= num_hidden_layers_;
  std::string text =
      absl::StrCat("tensor ", scheme_->compose({.prefix = prefix_,
                                                .mtp = mtp,
                                                .layer = mtp ? layer - num_hidden_layers_ : layer,
                                                .expert = expert,
                                                .matrix = matrix,
                                                .part = part}));
  if (range.file >= 0) {
    absl::StrAppend(&text, " in ",
                    files_[static_cast<size_t>(range.file)].path.filename().string());
  }
  return text;
}

}  // namespace expertd
