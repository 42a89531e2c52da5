#include "loader/weight_loader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/check.h"
#include "loader/file.h"
#include "loader/scale_check.h"

namespace expertd {
namespace {

constexpr int32_t kMaxDefaultThreads = 16;  // more readers gain nothing on one NVMe array
constexpr uint64_t kReadChunkBytes = 4u
                                     << 20;  // between two looks at the clock and the cancel flag
constexpr size_t kOpenFilesPerThread = 4;    // a matrix's parts may lie in different shards
constexpr absl::Duration kReservePatience = absl::Milliseconds(100);
constexpr absl::Duration kProgressInterval = absl::Milliseconds(100);

absl::Status CheckUnchanged(const ReadOnlyFile& open_file, const CheckpointFile& file) {
  const absl::StatusOr<FileIdentity> now = open_file.Identity();
  if (!now.ok()) return now.status();
  if (*now == file.identity) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(file.path.string(), ": changed during the load: found ",
                                          DescribeIdentity(*now), ", expected ",
                                          DescribeIdentity(file.identity)));
}

// One thread's open shards, the last used first. Every file is compared with what Checkpoint::Open
// saw.
class OpenShards {
 public:
  explicit OpenShards(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  absl::StatusOr<const ReadOnlyFile*> Get(int32_t file) {
    for (auto it = open_.begin(); it != open_.end(); ++it) {
      if (it->first != file) continue;
      open_.splice(open_.begin(), open_, it);
      return &open_.front().second;
    }
    const CheckpointFile& record = checkpoint_.files()[static_cast<size_t>(file)];
    absl::StatusOr<ReadOnlyFile> opened = ReadOnlyFile::Open(record.path);
    if (!opened.ok()) return absl::DataLossError(opened.status().message());
    const absl::Status unchanged = CheckUnchanged(*opened, record);
    if (!unchanged.ok()) return unchanged;
    if (open_.size() == kOpenFilesPerThread) open_.pop_back();
    open_.emplace_front(file, *std::move(opened));
    return &open_.front().second;
  }

 private:
  const Checkpoint& checkpoint_;
  std::list<std::pair<int32_t, ReadOnlyFile>> open_;
};

// One LoadWeights call. Readers take the next read of the plan until there is none or one has
// failed.
class LoadRun {
 public:
  LoadRun(const Checkpoint& checkpoint, const LoadPlan& plan, WeightSink& sink,
          const LoadOptions& options)
      : checkpoint_(checkpoint), plan_(plan), sink_(sink), options_(options) {
    for (const LayerSpec& spec : checkpoint.layers()) layers_[spec.layer] = spec;
  }

  absl::Status Run() {
    const int32_t cores = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
    const int32_t wanted =
        options_.num_threads > 0 ? options_.num_threads : std::min(cores, kMaxDefaultThreads);
    const auto num_threads =
        std::min(static_cast<size_t>(wanted), std::max<size_t>(plan_.reads.size(), 1));
    std::vector<std::thread> readers;
    try {
      for (size_t i = 1; i < num_threads; ++i) readers.emplace_back([this] { ReadUntilDone(); });
    } catch (const std::system_error&) {
      // The system gives no more threads: those that started, and this one, do the work.
    }
    ReadUntilDone();
    for (std::thread& reader : readers) reader.join();
    if (!error_.ok()) return error_;
    const absl::Status unchanged = CheckFilesAgain();
    if (!unchanged.ok()) return unchanged;
    Report();
    return sink_.Finish();
  }

 private:
  void ReadUntilDone() {
    OpenShards shards(checkpoint_);
    while (!failed_.load(std::memory_order_relaxed)) {
      const size_t next = next_read_.fetch_add(1, std::memory_order_relaxed);
      if (next >= plan_.reads.size()) return;
      absl::Status status = ReadMatrix(plan_.reads[next], &shards);
      if (status.ok()) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      if (error_.ok()) error_ = std::move(status);
      failed_.store(true, std::memory_order_relaxed);
    }
  }

  absl::Status ReadMatrix(const PlannedRead& read, OpenShards* shards) {
    const LayerSpec& spec = layers_.at(read.id.layer);
    const MatrixShape shape = ShapeOf(spec, read.id.matrix);
    absl::Status status = KeepGoing();
    if (!status.ok()) return status;
    const absl::StatusOr<MatrixBuffers> buffers = Reserve(read.id);
    if (!buffers.ok()) return buffers.status();
    EXPERTD_CHECK(buffers->codes.size() == read.location.codes.bytes);
    EXPERTD_CHECK(buffers->scales.size() == read.location.scales.bytes);

    float second_level = 1.0f;
    if (read.location.second_level.file >= 0) {
      std::array<uint8_t, sizeof(float)> bytes;
      status = ReadRange(read.location.second_level, absl::MakeSpan(bytes), shards);
      if (!status.ok()) return status;
      second_level = std::bit_cast<float>(bytes);
      if (const auto bad = FindBadSecondLevel(second_level)) {
        return BadValue(read, ExpertPart::kSecondLevel, *bad);
      }
    }
    status = ReadRange(read.location.scales, buffers->scales, shards);
    if (!status.ok()) return status;
    status = ReadRange(read.location.codes, buffers->codes, shards);
    if (!status.ok()) return status;
    if (const auto bad = FindBadBlockScale(spec.recipe, shape, buffers->codes, buffers->scales)) {
      return BadValue(
          read, spec.recipe == Recipe::kMxfp4 ? ExpertPart::kUe8m0Scales : ExpertPart::kE4m3Scales,
          *bad);
    }
    return sink_.Commit(read.id, second_level);
  }

  // A reader that fails keeps its buffer. Whoever waits for one in the sink looks up now and then:
  // it may never come back.
  absl::StatusOr<MatrixBuffers> Reserve(const MatrixId& id) {
    for (;;) {
      const absl::Time until = std::min(options_.deadline, absl::Now() + kReservePatience);
      absl::StatusOr<MatrixBuffers> buffers = sink_.Reserve(id, until);
      if (!absl::IsDeadlineExceeded(buffers.status()) || until == options_.deadline) return buffers;
      const absl::Status status = KeepGoing();
      if (!status.ok()) return status;
      if (failed_.load(std::memory_order_relaxed)) return buffers;  // the first error is told
    }
  }

  absl::Status ReadRange(const FileRange& range, absl::Span<uint8_t> into, OpenShards* shards) {
    const absl::StatusOr<const ReadOnlyFile*> file = shards->Get(range.file);
    if (!file.ok()) return file.status();
    EXPERTD_CHECK(into.size() == range.bytes);
    for (uint64_t done = 0; done < range.bytes;) {
      absl::Status status = KeepGoing();
      if (!status.ok()) return status;
      const uint64_t chunk = std::min(kReadChunkBytes, range.bytes - done);
      status = (*file)->ReadAt(range.offset + done, into.subspan(done, chunk));
      if (!status.ok()) return status;
      done += chunk;
      bytes_done_.fetch_add(static_cast<int64_t>(chunk), std::memory_order_relaxed);
    }
    ReportSometimes();
    return absl::OkStatus();
  }

  absl::Status KeepGoing() const {
    if (options_.cancelled != nullptr && options_.cancelled->load(std::memory_order_relaxed)) {
      return absl::CancelledError("the load was cancelled");
    }
    if (absl::Now() > options_.deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "loading the weights: the deadline passed after ",
          bytes_done_.load(std::memory_order_relaxed), " of ", plan_.total_bytes, " bytes"));
    }
    return absl::OkStatus();
  }

  absl::Status BadValue(const PlannedRead& read, ExpertPart part, const std::string& what) const {
    return absl::InvalidArgumentError(absl::StrCat(
        checkpoint_.Describe(read.id.layer, read.expert, read.id.matrix, part), ": ", what));
  }

  // By path: also sees a file that was replaced while its old self was open.
  absl::Status CheckFilesAgain() const {
    std::set<int32_t> used;
    for (const PlannedRead& read : plan_.reads) {
      used.insert({read.location.codes.file, read.location.scales.file});
      if (read.location.second_level.file >= 0) used.insert(read.location.second_level.file);
    }
    OpenShards shards(checkpoint_);
    for (const int32_t file : used) {
      const absl::Status status = shards.Get(file).status();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  void ReportSometimes() {
    if (!options_.on_progress) return;
    std::unique_lock<std::mutex> lock(progress_mutex_, std::try_to_lock);
    if (!lock.owns_lock() || absl::Now() < next_report_) return;
    next_report_ = absl::Now() + kProgressInterval;
    Call();
  }

  void Report() {
    if (!options_.on_progress) return;
    std::lock_guard<std::mutex> lock(progress_mutex_);
    Call();
  }

  void Call() {
    options_.on_progress({.bytes_done = bytes_done_.load(std::memory_order_relaxed),
                          .bytes_total = plan_.total_bytes,
                          .elapsed = absl::Now() - start_});
  }

  const Checkpoint& checkpoint_;
  const LoadPlan& plan_;
  WeightSink& sink_;
  const LoadOptions& options_;
  const absl::Time start_ = absl::Now();
  std::map<int32_t, LayerSpec> layers_;

  std::atomic<size_t> next_read_{0};
  std::atomic<int64_t> bytes_done_{0};
  std::atomic<bool> failed_{false};

  std::mutex mutex_;
  absl::Status error_;  // guarded by mutex_; the first

  std::mutex progress_mutex_;  // one callback at a time
  absl::Time next_report_ = start_ + kProgressInterval;
};

}  // namespace

absl::Status LoadWeights(const Checkpoint& checkpoint, const LoadPlan& plan, WeightSink& sink,
                         const LoadOptions& options) {
  return LoadRun(checkpoint, plan, sink, options).Run();
}

}  // namespace expertd
