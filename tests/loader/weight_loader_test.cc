#include "loader/weight_loader.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/checkpoint.h"
#include "loader/load_plan.h"
#include "tests/testing/memory_sink.h"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kShard0;
using testing::kShard1;
using testing::MemorySink;
using testing::TempDir;
using testing::TestCheckpoint;

std::string FloatBytes(float value) { return testing::internal::FloatBytes(value); }

std::string Text(const std::vector<uint8_t>& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

// Codes differ from byte to byte and tensor to tensor, scales stay in range.
TestCheckpoint Distinct(TestCheckpoint checkpoint) {
  uint32_t state = 1;
  for (auto& [file, tensors] : checkpoint.shards) {
    for (auto& [name, tensor] : tensors) {
      for (char& byte : tensor.data) {
        state = state * 1664525u + 1013904223u;
        if (name.ends_with(".weight")) byte = static_cast<char>(state >> 24);
        if (name.ends_with(".scale")) byte = static_cast<char>(120 + (state >> 28));
        if (name.ends_with(".weight_scale")) byte = static_cast<char>(1 + (state >> 26));
      }
    }
  }
  return checkpoint;
}

class WeightLoaderTest : public ::testing::Test {
 protected:
  // Opens what was written and prepares one rank with every expert.
  void Prepare(const TestCheckpoint& checkpoint) {
    checkpoint.Write(dir_.path());
    Prepare();
  }
  void Prepare() {
    absl::StatusOr<Checkpoint> opened = Checkpoint::Open(dir_.path());
    ASSERT_TRUE(opened.ok()) << opened.status();
    checkpoint_ = std::make_unique<Checkpoint>(*std::move(opened));
    const absl::StatusOr<Placement> placement = Placement::Contiguous(2, 1);
    ASSERT_TRUE(placement.ok());
    plan_ = MakeLoadPlan(*checkpoint_, *placement, 0, 1);
    sink_ = std::make_unique<MemorySink>(checkpoint_->layers(), *placement);
  }

  absl::Status Load(const LoadOptions& options = {}) {
    return LoadWeights(*checkpoint_, plan_, *sink_, options);
  }

  // Loads a checkpoint that must be refused for a value.
  std::string ValueRefusal(const TestCheckpoint& checkpoint) {
    Prepare(checkpoint);
    const absl::Status status = Load();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_FALSE(sink_->finished());
    return std::string(status.message());
  }

  TempDir dir_;
  std::unique_ptr<Checkpoint> checkpoint_;
  LoadPlan plan_;
  std::unique_ptr<MemorySink> sink_;
};

TEST_F(WeightLoaderTest, EveryByteArrivesWhereItBelongs) {
  TestCheckpoint written = Distinct(TestCheckpoint::Mxfp4());
  Prepare(written);
  ASSERT_TRUE(Load().ok());
  EXPECT_TRUE(sink_->finished());
  const char* names[] = {"w1", "w3", "w2"};  // by Matrix: gate, up, down
  for (int layer = 0; layer < 2; ++layer) {
    for (int expert = 0; expert < 2; ++expert) {
      for (int m = 0; m < 3; ++m) {
        const std::string base =
            absl::StrCat("layers.", layer, ".ffn.experts.", expert, ".", names[m]);
        const auto& matrix = sink_->Get({0, layer, expert, static_cast<Matrix>(m)});
        EXPECT_EQ(Text(matrix.codes), written.Find(base + ".weight").data) << base;
        EXPECT_EQ(Text(matrix.scales), written.Find(base + ".scale").data) << base;
        EXPECT_EQ(matrix.second_level, 1.0f);
      }
    }
  }
}

TEST_F(WeightLoaderTest, GateAndUpKeepTheirOwnSecondLevels) {
  TestCheckpoint written = Distinct(TestCheckpoint::Nvfp4());
  written.Find("layers.1.ffn.experts.0.w1.weight_scale_2").data = FloatBytes(0.125f);
  written.Find("layers.1.ffn.experts.0.w3.weight_scale_2").data = FloatBytes(1.25f);
  Prepare(written);
  ASSERT_TRUE(Load().ok());
  EXPECT_EQ(sink_->Get({0, 1, 0, Matrix::kGate}).second_level, 0.125f);
  EXPECT_EQ(sink_->Get({0, 1, 0, Matrix::kUp}).second_level, 1.25f);
  EXPECT_EQ(sink_->Get({0, 1, 0, Matrix::kDown}).second_level, 0.5f);
}

TEST_F(WeightLoaderTest, ManyReadersGiveTheSameBytesAsOne) {
  TestCheckpoint written = Distinct(TestCheckpoint::Nvfp4());
  LoadOptions options;
  options.num_threads = 1;
  Prepare(written);
  ASSERT_TRUE(Load(options).ok());
  const std::unique_ptr<MemorySink> one = std::move(sink_);
  options.num_threads = 8;
  Prepare();
  ASSERT_TRUE(Load(options).ok());
  for (const PlannedRead& read : plan_.reads) {
    EXPECT_EQ(sink_->Get(read.id).codes, one->Get(read.id).codes);
    EXPECT_EQ(sink_->Get(read.id).scales, one->Get(read.id).scales);
  }
}

TEST_F(WeightLoaderTest, OnlyThisRanksExpertsAreRead) {
  Distinct(TestCheckpoint::Mxfp4()).Write(dir_.path());
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok());
  const absl::StatusOr<Placement> placement = Placement::Contiguous(2, 2);
  ASSERT_TRUE(placement.ok());
  const LoadPlan plan = MakeLoadPlan(*checkpoint, *placement, 1, 1);
  ASSERT_EQ(plan.reads.size(), 2u * 3);
  for (const PlannedRead& read : plan.reads) EXPECT_EQ(read.expert, 1);
  MemorySink sink(checkpoint->layers(), *placement, 1, 1);
  ASSERT_TRUE(LoadWeights(*checkpoint, plan, sink).ok());
  EXPECT_EQ(sink.num_matrices(), 6u);
}

TEST_F(WeightLoaderTest, OneExpertMayFillSeveralSlots) {
  Distinct(TestCheckpoint::Mxfp4()).Write(dir_.path());
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok());
  const absl::StatusOr<Placement> placement = Placement::FromTable(2, 1, {0, 1, 0});
  ASSERT_TRUE(placement.ok());
  const LoadPlan plan = MakeLoadPlan(*checkpoint, *placement, 0, 1);
  MemorySink sink(checkpoint->layers(), *placement);
  ASSERT_TRUE(LoadWeights(*checkpoint, plan, sink).ok());
  EXPECT_EQ(sink.Get({0, 0, 0, Matrix::kUp}).codes, sink.Get({0, 0, 2, Matrix::kUp}).codes);
}

TEST_F(WeightLoaderTest, MatrixThatThePlanForgetsIsRefusedByTheSink) {
  Prepare(TestCheckpoint::Mxfp4());
  plan_.reads.pop_back();
  const absl::Status status = Load();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("missing"));
}

// --- values

TEST_F(WeightLoaderTest, SecondLevelsThatAreNotPositiveNumbersAreRefused) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0f, -0.0f, -1.0f, kNan, kInfinity, -kInfinity}) {
    TestCheckpoint checkpoint = TestCheckpoint::Nvfp4();
    checkpoint.Find("layers.0.ffn.experts.1.w3.weight_scale_2").data = FloatBytes(bad);
    EXPECT_THAT(ValueRefusal(checkpoint),
                AllOf(HasSubstr("tensor layers.0.ffn.experts.1.w3.weight_scale_2 in "),
                      HasSubstr(kShard0), HasSubstr("second-level scale: found"),
                      HasSubstr("expected a finite number above 0")))
        << bad;
  }
}

TEST_F(WeightLoaderTest, NanE4m3BlockScalesAreRefused) {
  for (const char bad : {'\x7f', '\xff'}) {
    TestCheckpoint checkpoint = TestCheckpoint::Nvfp4();
    checkpoint.Find("layers.1.ffn.experts.0.w2.weight_scale").data[5] = bad;
    EXPECT_THAT(ValueRefusal(checkpoint),
                AllOf(HasSubstr("w2.weight_scale in "), HasSubstr(kShard1),
                      HasSubstr("block scale [2, 1]: found NaN"), HasSubstr("expected a number")));
  }
}

TEST_F(WeightLoaderTest, NanUe8m0BlockScaleIsRefusedEvenForAZeroBlock) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.Find("layers.1.ffn.experts.0.w2.scale").data[5] = '\xff';
  checkpoint.Find("layers.1.ffn.experts.0.w2.weight").data.assign(64 * 16, '\0');
  EXPECT_THAT(
      ValueRefusal(checkpoint),
      AllOf(HasSubstr("w2.scale in "), HasSubstr("block scale [5, 0]: found NaN (byte 255)")));
}

TEST_F(WeightLoaderTest, NonZeroMxfp4BlockOutOfRangeIsRefusedByName) {
  for (const int bad : {0, 26, 188, 254}) {
    TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
    checkpoint.Find("layers.0.ffn.experts.1.w1.scale").data[7] = static_cast<char>(bad);
    EXPECT_THAT(ValueRefusal(checkpoint),
                AllOf(HasSubstr("tensor layers.0.ffn.experts.1.w1.scale in "),
                      HasSubstr(absl::StrCat("block scale [3, 1]: found 2^", bad - 127)),
                      HasSubstr("expected 2^-100 to 2^60")));
  }
}

TEST_F(WeightLoaderTest, EndsOfTheMxfp4RangeAndZeroBlocksOutsideAreAccepted) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  auto& scales = checkpoint.Find("layers.0.ffn.experts.1.w1.scale").data;
  auto& codes = checkpoint.Find("layers.0.ffn.experts.1.w1.weight").data;
  scales[0] = static_cast<char>(27);
  scales[1] = static_cast<char>(187);
  scales[4] = '\0';                                                          // row 2, block 0
  for (int i = 0; i < 16; ++i) codes[2 * 32 + i] = i % 2 ? '\x80' : '\x08';  // +0 and -0
  scales[7] = '\xfe';                                                        // row 3, block 1
  for (int i = 0; i < 16; ++i) codes[3 * 32 + 16 + i] = '\0';
  Prepare(checkpoint);
  const absl::Status status = Load();
  EXPECT_TRUE(status.ok()) << status;
}

// --- files

TEST_F(WeightLoaderTest, FileReplacedBeforeTheLoadIsRefused) {
  Prepare(TestCheckpoint::Mxfp4());
  fs::copy_file(dir_.path() / kShard1, dir_.path() / "copy");
  fs::rename(dir_.path() / "copy", dir_.path() / kShard1);
  const absl::Status status = Load();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(kShard1), HasSubstr("changed during the load: found"),
                    HasSubstr("expected"), HasSubstr("inode")));
}

TEST_F(WeightLoaderTest, FileReplacedDuringTheLoadIsRefused) {
  // The sink replaces a file that has been read already, while the last matrix is under way.
  class ReplacingSink : public MemorySink {
   public:
    using MemorySink::MemorySink;
    absl::Status Commit(const MatrixId& id, float second_level) override {
      if (++commits == 12) {
        fs::copy_file(path, path.string() + ".new");
        fs::rename(path.string() + ".new", path);
      }
      return MemorySink::Commit(id, second_level);
    }
    int commits = 0;
    fs::path path;
  };
  Prepare(TestCheckpoint::Mxfp4());
  ReplacingSink sink(checkpoint_->layers(), *Placement::Contiguous(2, 1));
  sink.path = dir_.path() / kShard0;
  LoadOptions options;
  options.num_threads = 1;
  const absl::Status status = LoadWeights(*checkpoint_, plan_, sink, options);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_FALSE(sink.finished());
}

TEST_F(WeightLoaderTest, FileThatShrankIsRefused) {
  Prepare(TestCheckpoint::Mxfp4());
  fs::resize_file(dir_.path() / kShard1, 100);
  const absl::Status status = Load();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("found 100 bytes"));
}

TEST_F(WeightLoaderTest, FileModifiedInPlaceIsRefused) {
  Prepare(TestCheckpoint::Mxfp4());
  fs::last_write_time(dir_.path() / kShard1,
                      fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(Load().code(), absl::StatusCode::kDataLoss);
}

TEST_F(WeightLoaderTest, FileThatVanishedIsRefused) {
  Prepare(TestCheckpoint::Mxfp4());
  fs::remove(dir_.path() / kShard1);
  EXPECT_EQ(Load().code(), absl::StatusCode::kDataLoss);
}

// --- the end of a load

TEST_F(WeightLoaderTest, CancelledLoadStops) {
  Prepare(TestCheckpoint::Mxfp4());
  const std::atomic<bool> cancelled{true};
  LoadOptions options;
  options.cancelled = &cancelled;
  EXPECT_EQ(Load(options).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(sink_->num_matrices(), 0u);
}

TEST_F(WeightLoaderTest, PassedDeadlineSaysHowFarItCame) {
  Prepare(TestCheckpoint::Mxfp4());
  LoadOptions options;
  options.deadline = absl::Now() - absl::Seconds(1);
  const absl::Status status = Load(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("0 of ", plan_.total_bytes)));
}

TEST_F(WeightLoaderTest, ErrorOfTheSinkEndsTheLoad) {
  class RefusingSink : public MemorySink {
   public:
    using MemorySink::MemorySink;
    absl::StatusOr<MatrixBuffers> Reserve(const MatrixId& id, absl::Time deadline) override {
      if (++reserved == 3) return absl::ResourceExhaustedError("no more memory");
      return MemorySink::Reserve(id, deadline);
    }
    std::atomic<int> reserved{0};
  };
  Prepare(TestCheckpoint::Mxfp4());
  RefusingSink sink(checkpoint_->layers(), *Placement::Contiguous(2, 1));
  LoadOptions options;
  options.num_threads = 4;
  const absl::Status status = LoadWeights(*checkpoint_, plan_, sink, options);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "no more memory");
  EXPECT_FALSE(sink.finished());
}

// As a backend with a bounded pool: Reserve waits until a buffer is given back by Commit.
class OneBufferSink : public MemorySink {
 public:
  using MemorySink::MemorySink;
  absl::StatusOr<MatrixBuffers> Reserve(const MatrixId& id, absl::Time deadline) override {
    std::unique_lock<std::mutex> lock(pool_mutex_);
    waiting = true;
    if (!changed_.wait_until(lock, absl::ToChronoTime(deadline), [&] { return free_; })) {
      return absl::DeadlineExceededError("the buffer is in use");
    }
    free_ = false;
    return MemorySink::Reserve(id, deadline);
  }
  absl::Status Commit(const MatrixId& id, float second_level) override {
    {
      std::lock_guard<std::mutex> lock(pool_mutex_);
      free_ = true;
    }
    changed_.notify_one();
    return MemorySink::Commit(id, second_level);
  }
  void TakeTheBuffer() { free_ = false; }
  std::atomic<bool> waiting{false};

 private:
  std::mutex pool_mutex_;
  std::condition_variable changed_;
  bool free_ = true;
};

TEST_F(WeightLoaderTest, ReadersThatWaitForTheSinkEndWithTheFirstError) {
  TestCheckpoint checkpoint = TestCheckpoint::Mxfp4();
  checkpoint.Find("layers.0.ffn.experts.1.w1.scale").data[0] = static_cast<char>(255);
  Prepare(checkpoint);
  OneBufferSink sink(checkpoint_->layers(), *Placement::Contiguous(2, 1));
  LoadOptions options;
  options.num_threads = 4;
  const absl::Status status = LoadWeights(*checkpoint_, plan_, sink, options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_F(WeightLoaderTest, CancelReachesAReaderThatWaitsForTheSink) {
  Prepare(TestCheckpoint::Mxfp4());
  OneBufferSink sink(checkpoint_->layers(), *Placement::Contiguous(2, 1));
  sink.TakeTheBuffer();
  std::atomic<bool> cancelled{false};
  std::thread canceller([&] {
    while (!sink.waiting) std::this_thread::yield();
    cancelled = true;
  });
  LoadOptions options;
  options.cancelled = &cancelled;
  EXPECT_EQ(LoadWeights(*checkpoint_, plan_, sink, options).code(), absl::StatusCode::kCancelled);
  canceller.join();
}

TEST_F(WeightLoaderTest, FullSinkIsToldAtTheDeadline) {
  Prepare(TestCheckpoint::Mxfp4());
  OneBufferSink sink(checkpoint_->layers(), *Placement::Contiguous(2, 1));
  sink.TakeTheBuffer();
  LoadOptions options;
  options.deadline = absl::Now() + absl::Milliseconds(250);  // longer than one wait
  const absl::Status status = LoadWeights(*checkpoint_, plan_, sink, options);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(WeightLoaderTest, ProgressEndsWithAllBytes) {
  Prepare(TestCheckpoint::Nvfp4());
  std::vector<LoadProgress> seen;
  std::atomic<int> inside{0};
  LoadOptions options;
  options.num_threads = 4;
  options.on_progress = [&](const LoadProgress& progress) {
    EXPECT_EQ(inside.fetch_add(1), 0) << "two callbacks at once";
    seen.push_back(progress);
    inside.fetch_sub(1);
  };
  ASSERT_TRUE(Load(options).ok());
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen.back().bytes_done, plan_.total_bytes);
  EXPECT_EQ(seen.back().bytes_total, plan_.total_bytes);
}

TEST_F(WeightLoaderTest, EmptyPlanOnlyFinishes) {
  Prepare(TestCheckpoint::Mxfp4());
  const absl::StatusOr<Placement> placement = Placement::FromTable(2, 2, {0, 1, -1, -1});
  ASSERT_TRUE(placement.ok());
  const LoadPlan plan = MakeLoadPlan(*checkpoint_, *placement, 1, 1);
  EXPECT_TRUE(plan.reads.empty());
  MemorySink sink(checkpoint_->layers(), *placement, 1, 1);
  EXPECT_TRUE(LoadWeights(*checkpoint_, plan, sink).ok());
  EXPECT_TRUE(sink.finished());
}

}  // namespace
}  // namespace expertd
