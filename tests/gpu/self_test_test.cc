#include "kernels/cuda/nccl_comm/self_test.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "absl/types/span.h"
#include "tests/gpu/testing/device.h"

// The pattern test, with two ranks on one device: their windows lie side by side in one allocation.
namespace expertd::testing {
namespace {

using cuda::PeerMap;
using cuda::SelfTestRecord;
using cuda::SelfTestRun;

constexpr int kNumRanks = 2;
constexpr int64_t kWindowBytes = (1 << 20) + 16;
constexpr int64_t kFlagsOffset = 2 << 20;
constexpr int64_t kStride = 4 << 20;

class SelfTestTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(cuda::LoadSelfTestKernels(), absl::OkStatus());
    windows_ = std::make_unique<DeviceArray<char>>(kNumRanks * kStride, 0);
    records_ = std::make_unique<DeviceArray<SelfTestRecord>>(kNumRanks * kNumRanks);
  }

  SelfTestRun Run(int rank) const {
    SelfTestRun run;
    run.peers = PeerMap{windows_->data(), kStride, rank, kNumRanks};
    run.window_bytes = kWindowBytes;
    run.flags_offset = kFlagsOffset;
    run.round = 1;
    run.wait_ns = 500'000'000;
    run.records = records_->data() + rank * kNumRanks;
    return run;
  }

  // What each rank finds, each on a stream of its own.
  std::vector<absl::Status> RunAll(const std::vector<SelfTestRun>& runs) const {
    std::vector<cudaStream_t> streams(runs.size());
    for (size_t i = 0; i < runs.size(); ++i) {
      EXPECT_EQ(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), cudaSuccess);
    }
    for (size_t i = 0; i < runs.size(); ++i) {
      EXPECT_EQ(cuda::EnqueueSelfTest(runs[i], streams[i]), absl::OkStatus());
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (cudaStream_t stream : streams) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    const std::vector<SelfTestRecord> records = records_->Download();
    std::vector<absl::Status> found;
    for (size_t i = 0; i < runs.size(); ++i) {
      found.push_back(
          cuda::JudgeSelfTest(absl::MakeSpan(records).subspan(i * kNumRanks, kNumRanks)));
    }
    return found;
  }

  std::unique_ptr<DeviceArray<char>> windows_;
  std::unique_ptr<DeviceArray<SelfTestRecord>> records_;
};

TEST_F(SelfTestTest, GoodMappingsPassAndLeaveTheWindowsZero) {
  for (uint32_t round = 1; round <= 3; ++round) {
    std::vector<SelfTestRun> runs = {Run(0), Run(1)};
    for (SelfTestRun& run : runs) run.round = round;
    for (const absl::Status& status : RunAll(runs)) EXPECT_EQ(status, absl::OkStatus());
    const std::vector<char> bytes = windows_->Download();
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const auto begin = bytes.begin() + rank * kStride;
      EXPECT_TRUE(std::all_of(begin, begin + kWindowBytes, [](char byte) { return byte == 0; }));
    }
  }
}

// Both windows of rank 1's map are the other rank's.
TEST_F(SelfTestTest, ExchangedWindowsAreFound) {
  std::vector<SelfTestRun> runs = {Run(0), Run(1)};
  runs[1].peers.base += kStride;
  runs[1].peers.stride = -kStride;
  const auto found = RunAll(runs);
  EXPECT_EQ(found[1].code(), absl::StatusCode::kInternal) << found[1];
}

// Rank 1's stores to rank 0 land 16 bytes off, its flags where they belong.
TEST_F(SelfTestTest, AShiftedWindowIsFound) {
  std::vector<SelfTestRun> runs = {Run(0), Run(1)};
  runs[1].peers.base += 16;
  runs[1].peers.stride -= 16;
  runs[1].flags_offset -= 16;
  const auto found = RunAll(runs);
  EXPECT_EQ(found[0].code(), absl::StatusCode::kInternal) << found[0];
  EXPECT_NE(found[0].message().find("the pattern of rank 1"), std::string::npos) << found[0];
}

TEST_F(SelfTestTest, AWriterThatDoesNotComeIsNamed) {
  const auto found = RunAll({Run(0)});
  EXPECT_EQ(found[0].code(), absl::StatusCode::kDeadlineExceeded) << found[0];
  EXPECT_NE(found[0].message().find("the pattern of rank 1"), std::string::npos) << found[0];
}

TEST_F(SelfTestTest, OneRankIsItsOwnPeer) {
  SelfTestRun run = Run(0);
  run.peers = PeerMap{windows_->data(), 0, 0, 1};
  ASSERT_EQ(cuda::EnqueueSelfTest(run, nullptr), absl::OkStatus());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto records = records_->Download();
  EXPECT_EQ(cuda::JudgeSelfTest(absl::MakeSpan(records).subspan(0, 1)), absl::OkStatus());
}

}  // namespace
}  // namespace expertd::testing
