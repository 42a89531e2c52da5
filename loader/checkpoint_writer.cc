#include "loader/checkpoint_writer.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/check.h"
#include "config/limits.h"
#include "loader/checkpoint_content.h"
#include "loader/checkpoint_plan.h"

namespace expertd {
namespace {

constexpr size_t kChunkBytes = 1 << 20;  // generated and handed to the file at a time

// A file being written. Errors stick; Close says whether every byte arrived.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path)
      : path_(std::move(path)), file_(std::fopen(path_.c_str(), "wbx"), &std::fclose) {
    if (file_ == nullptr) {
      error_ = errno;
    } else {
      std::setvbuf(file_.get(), nullptr, _IONBF, 0);  // chunks are large
    }
  }

  void Write(const void* data, size_t bytes) {
    if (error_ == 0 && bytes > 0 && std::fwrite(data, 1, bytes, file_.get()) != bytes) {
      error_ = errno != 0 ? errno : EIO;
    }
    written_ += bytes;
  }

  absl::Status Close() {
    if (file_ != nullptr && std::fclose(file_.release()) != 0 && error_ == 0) error_ = errno;
    if (error_ == 0) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat("cannot write ", path_.string(), ": ", std::strerror(error_)));
  }

  uint64_t written() const { return written_; }

 private:
  std::filesystem::path path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  int error_ = 0;
  uint64_t written_ = 0;
};

absl::Status WriteText(const std::filesystem::path& path, const std::string& text) {
  OutputFile file(path);
  file.Write(text.data(), text.size());
  return file.Close();
}

// Gives a tensor's bytes in chunks that end with its rows.
class TensorBytes {
 public:
  TensorBytes(const CheckpointRequest& request, const PlannedTensor& tensor)
      : tensor_(tensor),
        matrix_(request.seed, tensor.layer, tensor.expert, tensor.matrix,
                ShapeIn(request, tensor.matrix), tensor.recipe, request.power_of_two_scales),
        router_key_(RandomWord(request.seed, static_cast<uint64_t>(tensor.layer))) {}

  void WriteTo(OutputFile* file, std::vector<uint8_t>* chunk) const {
    const size_t row_bytes = RowBytes();
    const size_t num_rows = tensor_.bytes / row_bytes;
    const size_t rows_per_chunk = std::max<size_t>(1, kChunkBytes / row_bytes);
    for (size_t first = 0; first < num_rows; first += rows_per_chunk) {
      const size_t rows = std::min(rows_per_chunk, num_rows - first);
      chunk->resize(rows * row_bytes);
      for (size_t row = 0; row < rows; ++row) {
        FillRow(static_cast<int64_t>(first + row),
                absl::MakeSpan(*chunk).subspan(row * row_bytes, row_bytes));
      }
      Patch(first * row_bytes, absl::MakeSpan(*chunk));
      file->Write(chunk->data(), chunk->size());
    }
  }

 private:
  size_t RowBytes() const {
    return tensor_.shape.empty() ? tensor_.bytes
                                 : tensor_.bytes / static_cast<size_t>(tensor_.shape[0]);
  }

  void FillRow(int64_t row, absl::Span<uint8_t> bytes) const {
    switch (tensor_.content) {
      case TensorContent::kCodes:
        return matrix_.FillCodes(row, bytes);
      case TensorContent::kScales:
        return matrix_.FillScales(row, bytes);
      case TensorContent::kSecondLevel:
        return FillFloat(matrix_.second_level(), bytes);
      case TensorContent::kInputScale:
        return FillFloat(0.0123f, bytes);  // read and reported, never used
      case TensorContent::kOtherModule:
        return FillRouterRow(row, bytes);
    }
  }

  static void FillFloat(float value, absl::Span<uint8_t> bytes) {
    EXPERTD_CHECK(bytes.size() == sizeof value);
    std::memcpy(bytes.data(), &value, sizeof value);
  }

  // BF16 numbers between 2^-8 and 2^-7 of either sign.
  void FillRouterRow(int64_t row, absl::Span<uint8_t> bytes) const {
    for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
      const uint64_t word = RandomWord(router_key_ ^ static_cast<uint64_t>(row), i);
      const auto value = static_cast<uint16_t>(0x3b80 | (word & 0x807f));
      std::memcpy(bytes.data() + i, &value, sizeof value);
    }
  }

  // Broken variants: the planned bytes over the content.
  void Patch(uint64_t chunk_offset, absl::Span<uint8_t> chunk) const {
    for (size_t i = 0; i < tensor_.patch.size(); ++i) {
      const uint64_t at = tensor_.patch_offset + i;
      if (at < chunk_offset || at >= chunk_offset + chunk.size()) continue;
      chunk[at - chunk_offset] = static_cast<uint8_t>(tensor_.patch[i]);
    }
  }

  const PlannedTensor& tensor_;
  RandomMatrix matrix_;
  uint64_t router_key_;
};

// 8 bytes of length, then JSON padded with spaces to a multiple of 8.
std::string ShardHeader(const CheckpointRequest& request, const std::vector<PlannedTensor>& tensors,
                        bool last_shard) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  uint64_t offset = 0;
  for (const PlannedTensor& tensor : tensors) {
    absl::StrAppend(&json, ",\"", tensor.name, "\":{\"dtype\":\"", tensor.dtype, "\",\"shape\":[",
                    absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[", offset, ",",
                    offset + tensor.bytes, "]}");
    offset += tensor.bytes;
  }
  json.push_back('}');
  json.resize((json.size() + 7) / 8 * 8, ' ');
  uint64_t length = json.size();
  if (last_shard && request.defect == CheckpointDefect::kHeaderTooLong) {
    length = limits::kMaxSafetensorsHeaderBytes + 1;
  }
  std::string header(sizeof length, '\0');
  std::memcpy(header.data(), &length, sizeof length);
  return header + json;
}

absl::Status WriteShard(const CheckpointRequest& request, const CheckpointPlan& plan, size_t shard,
                        uint64_t* bytes) {
  OutputFile file(request.dir / plan.ShardName(shard));
  const std::string header =
      ShardHeader(request, plan.shards[shard], shard + 1 == plan.shards.size());
  file.Write(header.data(), header.size());
  std::vector<uint8_t> chunk;
  for (const PlannedTensor& tensor : plan.shards[shard]) {
    TensorBytes(request, tensor).WriteTo(&file, &chunk);
  }
  *bytes += file.written();
  return file.Close();
}

absl::Status BreakLastShard(const CheckpointRequest& request, const CheckpointPlan& plan) {
  const std::filesystem::path path = request.dir / plan.ShardName(plan.shards.size() - 1);
  std::error_code error;
  if (request.defect == CheckpointDefect::kMissingShard) std::filesystem::remove(path, error);
  if (request.defect == CheckpointDefect::kTruncatedShard) {
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1, error);
  }
  if (request.defect == CheckpointDefect::kTrailingBytes) {
    std::filesystem::resize_file(path, std::filesystem::file_size(path) + 1, error);
  }
  if (error) return absl::UnavailableError(absl::StrCat(path.string(), ": ", error.message()));
  return absl::OkStatus();
}

absl::Status MakeEmptyDirectory(const std::filesystem::path& dir) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot make ", dir.string(), ": ", error.message()));
  }
  if (!std::filesystem::is_empty(dir, error) || error) {
    return absl::AlreadyExistsError(absl::StrCat("directory: got ", dir.string(),
                                                 " with files in it, expected a new or empty one"));
  }
  return absl::OkStatus();
}

absl::Status CheckFreeSpace(const std::filesystem::path& dir, uint64_t bytes) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(dir, error);
  if (error || space.available >= bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "directory: ", dir.string(), " has ", space.available, " bytes free, expected ", bytes));
}

}  // namespace

absl::Status WriteCheckpoint(const CheckpointRequest& request, CheckpointSummary* summary) {
  if (auto status = CheckRequest(request); !status.ok()) return status;
  const CheckpointPlan plan = PlanCheckpoint(request);
  for (const CheckpointDefectInfo& info : CheckpointDefects()) {
    if (info.defect == request.defect && info.needs_two_shards && plan.shards.size() < 2) {
      return absl::InvalidArgumentError(
          "shard size: got one shard, expected at least two to break");
    }
  }
  if (plan.shards.size() > static_cast<size_t>(limits::kMaxShards)) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard size: got ", request.shard_bytes, " bytes, which makes ",
                     plan.shards.size(), " shards, expected at most ", limits::kMaxShards));
  }
  if (auto status = MakeEmptyDirectory(request.dir); !status.ok()) return status;

  if (auto status = CheckFreeSpace(request.dir, plan.TensorBytes()); !status.ok()) return status;

  CheckpointSummary written;
  written.num_shards = static_cast<int32_t>(plan.shards.size());
  for (size_t shard = 0; shard < plan.shards.size(); ++shard) {
    if (auto status = WriteShard(request, plan, shard, &written.bytes); !status.ok()) return status;
    written.num_tensors += static_cast<int64_t>(plan.shards[shard].size());
  }
  if (auto status = BreakLastShard(request, plan); !status.ok()) return status;
  for (const auto& [name, text] : ConfigFiles(request)) {
    if (auto status = WriteText(request.dir / name, text); !status.ok()) return status;
  }
  if (summary != nullptr) *summary = written;
  // Last, so that a directory whose writing was cut short does not look whole.
  return WriteText(request.dir / "model.safetensors.index.json", IndexJson(request, plan));
}

}  // namespace expertd
