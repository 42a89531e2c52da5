#include "kernels/cuda/nccl_comm/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <functional>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/nccl_comm/nccl_status.h"
#include "kernels/fatal.h"
#include "tests/gpu/testing/child_process.h"
#include "tests/gpu/testing/device.h"

// Groups of ranks: as threads of this process, and as processes of their own.
namespace expertd::testing {
namespace {

using cuda::Communicator;
using cuda::CommunicatorOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Seconds(10);
constexpr absl::Duration kChildLimit = absl::Seconds(30);
constexpr int64_t kWindowBytes = (8 << 20) + 48;  // no multiple of any granularity
constexpr int64_t kLargeWindowBytes = int64_t{1} << 30;

class CommunicatorTest : public GpuTest {};

class CommunicatorOfTwoTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    int count = 0;
    ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    if (count < 2) GTEST_SKIP() << "needs 2 GPUs, found " << count;
  }
};

CommunicatorOptions Options(const ncclUniqueId& id, int rank, int num_ranks,
                            absl::Duration limit = kLimit) {
  CommunicatorOptions options;
  options.id = id;
  options.rank = rank;
  options.num_ranks = num_ranks;
  options.limit = limit;
  return options;
}

ncclUniqueId NewId() {
  auto id = cuda::MakeCommunicatorId();
  EXPECT_TRUE(id.ok()) << id.status();
  return id.ok() ? *id : ncclUniqueId{};
}

// `body` of every rank on a thread of its own, device = rank.
void OnEachDevice(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([rank, &body] {
      ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
      body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Whether a rank's own window is zero.
bool WindowIsZero(const Communicator& communicator) {
  std::vector<char> bytes(communicator.window_bytes(), 1);
  const cuda::PeerMap& peers = communicator.peers();
  EXPECT_EQ(
      cudaMemcpy(bytes.data(), peers.at<char>(peers.rank, 0), bytes.size(), cudaMemcpyDeviceToHost),
      cudaSuccess);
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
}

// Opens a window and tests it, twice. `meet`: waits for all ranks, where the test can; a rank that
// looks at its window must not see the next test of a peer.
absl::Status OpenAndTest(Communicator* communicator, const std::function<void()>& meet) {
  if (absl::Status status = communicator->OpenWindow(kWindowBytes); !status.ok()) return status;
  meet();
  if (!WindowIsZero(*communicator)) return absl::InternalError("a new window is not zero");
  for (int round = 0; round < 2; ++round) {
    meet();
    if (absl::Status status = communicator->SelfTest(nullptr); !status.ok()) return status;
    meet();
    if (!WindowIsZero(*communicator)) return absl::InternalError("the self-test left something");
  }
  return absl::OkStatus();
}

// For one rank.
void MeetNobody() {}

TEST_F(CommunicatorTest, OneRankNeedsNoPeer) {
  auto communicator = Communicator::Create(Options({}, 0, 1));
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  EXPECT_TRUE((*communicator)->mapped());
  EXPECT_EQ((*communicator)->nccl(), nullptr);
  EXPECT_EQ(OpenAndTest(communicator->get(), MeetNobody), absl::OkStatus());
  EXPECT_EQ((*communicator)->peers().stride, 0);
  EXPECT_EQ((*communicator)->window_bytes(), kWindowBytes);
}

TEST_F(CommunicatorTest, WrongOptionsAreRefused) {
  EXPECT_THAT(Communicator::Create(Options({}, 2, 2)).status().message(),
              HasSubstr("rank: found 2, expected 0 to 1"));
  EXPECT_THAT(Communicator::Create(Options({}, 0, 0)).status().message(),
              HasSubstr("num_ranks: found 0"));
  EXPECT_THAT(Communicator::Create(Options({}, 0, 1, absl::ZeroDuration())).status().message(),
              HasSubstr("limit: found 0"));
}

TEST_F(CommunicatorTest, AWindowTooSmallForAPatternIsRefused) {
  auto communicator = Communicator::Create(Options({}, 0, 1));
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  EXPECT_EQ((*communicator)->OpenWindow(15),
            absl::InvalidArgumentError("window bytes: found 15, expected at least 16"));
}

TEST_F(CommunicatorTest, MoreMemoryThanThereIsIsRefused) {
  auto communicator = Communicator::Create(Options({}, 0, 1));
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  const absl::Status status = (*communicator)->OpenWindow(int64_t{1} << 50);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 0 of 1: window"), HasSubstr("are free")));
}

TEST_F(CommunicatorTest, APeerThatNeverComesEndsCreateWithinItsLimit) {
  const absl::Time begin = absl::Now();
  const absl::Status status =
      Communicator::Create(Options(NewId(), 0, 2, absl::Seconds(2))).status();
  const absl::Duration took = absl::Now() - begin;
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(status.message(), HasSubstr("rank 0 of 2: init (limit 2s)"));
  EXPECT_FALSE(IsFatal(status));
  EXPECT_LT(took, absl::Seconds(5));
}

TEST_F(CommunicatorOfTwoTest, ThreadsOfOneProcessAreMappedIntoEachOther) {
  const ncclUniqueId id = NewId();
  std::barrier<> barrier(2);
  OnEachDevice(2, [&](int rank) {
    auto communicator = Communicator::Create(Options(id, rank, 2));
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    ASSERT_TRUE((*communicator)->mapped()) << (*communicator)->why_not_mapped();
    const auto meet = [&] { barrier.arrive_and_wait(); };
    EXPECT_EQ(OpenAndTest(communicator->get(), meet), absl::OkStatus());
    EXPECT_NE((*communicator)->peers().stride, 0);
    EXPECT_EQ((*communicator)->peers().rank, rank);
    EXPECT_EQ((*communicator)->peers().num_ranks, 2);
  });
}

// A rank that is late in every step: nothing that the other one has running keeps it from coming.
TEST_F(CommunicatorOfTwoTest, ALateRankIsWaitedFor) {
  const ncclUniqueId id = NewId();
  OnEachDevice(2, [&](int rank) {
    const auto delay = [rank] {
      if (rank == 0) absl::SleepFor(absl::Milliseconds(300));
    };
    delay();
    auto communicator = Communicator::Create(Options(id, rank, 2));
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    delay();
    EXPECT_EQ((*communicator)->OpenWindow(kWindowBytes), absl::OkStatus());
    delay();
    EXPECT_EQ((*communicator)->SelfTest(nullptr), absl::OkStatus());
    delay();
  });
}

// A new window for every generation, and none of the old ones stays.
TEST_F(CommunicatorOfTwoTest, GenerationsFollowEachOther) {
  size_t free_before[2] = {};
  size_t free_after[2] = {};
  for (int generation = 0; generation < 4; ++generation) {
    const ncclUniqueId id = NewId();
    OnEachDevice(2, [&](int rank) {
      auto communicator = Communicator::Create(Options(id, rank, 2));
      ASSERT_TRUE(communicator.ok()) << communicator.status();
      EXPECT_EQ((*communicator)->OpenWindow(kLargeWindowBytes), absl::OkStatus());
      EXPECT_EQ((*communicator)->SelfTest(nullptr), absl::OkStatus());
    });
    OnEachDevice(2, [&](int rank) {
      size_t total = 0;
      ASSERT_EQ(cudaMemGetInfo(&(generation == 0 ? free_before : free_after)[rank], &total),
                cudaSuccess);
    });
  }
  for (int rank = 0; rank < 2; ++rank) EXPECT_GE(free_after[rank] + (4 << 20), free_before[rank]);
}

TEST_F(CommunicatorOfTwoTest, UnequalWindowsAreRefusedOnBothRanks) {
  const ncclUniqueId id = NewId();
  OnEachDevice(2, [&](int rank) {
    auto communicator = Communicator::Create(Options(id, rank, 2));
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    const absl::Status status = (*communicator)->OpenWindow(4096 + 16 * rank);
    EXPECT_THAT(status.message(), HasSubstr("window bytes: rank 1 has 4112, rank 0 has 4096"));
  });
}

TEST_F(CommunicatorOfTwoTest, ARankWithoutMemoryFailsBoth) {
  const ncclUniqueId id = NewId();
  OnEachDevice(2, [&](int rank) {
    auto communicator = Communicator::Create(Options(id, rank, 2));
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    const absl::Status status = (*communicator)->OpenWindow(int64_t{1} << (rank == 1 ? 50 : 20));
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(status.message(), HasSubstr("rank 1 ("));
  });
}

TEST_F(CommunicatorOfTwoTest, AMissingPeerEndsEveryStepWithinItsLimit) {
  for (const std::string step : {"window", "self-test"}) {
    const ncclUniqueId id = NewId();
    OnEachDevice(2, [&](int rank) {
      auto communicator = Communicator::Create(Options(id, rank, 2, absl::Seconds(3)));
      ASSERT_TRUE(communicator.ok()) << communicator.status();
      if (step == "self-test") {
        ASSERT_EQ((*communicator)->OpenWindow(kWindowBytes), absl::OkStatus());
      }
      if (rank == 1) {  // alive, but does not come
        absl::SleepFor(absl::Seconds(5));
        return;
      }
      const absl::Time begin = absl::Now();
      const absl::Status status = step == "window" ? (*communicator)->OpenWindow(kWindowBytes)
                                                   : (*communicator)->SelfTest(nullptr);
      const absl::Duration took = absl::Now() - begin;
      EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
      EXPECT_THAT(status.message(), HasSubstr("rank 0 of 2: " + step + " (limit 3s)"));
      EXPECT_FALSE(IsFatal(status)) << status;
      EXPECT_LT(took, absl::Milliseconds(3500));
    });
  }
}

TEST_F(CommunicatorOfTwoTest, HostLaunchedCollectivesRunOnTheSameCommunicator) {
  const ncclUniqueId id = NewId();
  OnEachDevice(2, [&](int rank) {
    auto communicator = Communicator::Create(Options(id, rank, 2));
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    const DeviceArray<float> values(std::vector<float>(1000, 1.0f + rank));
    const ncclComm_t comm = (*communicator)->nccl();
    const ncclResult_t called =
        ncclAllReduce(values.data(), values.data(), 1000, ncclFloat, ncclSum, comm, nullptr);
    EXPECT_EQ(cuda::AwaitNccl(comm, called, absl::Now() + kLimit, "sum"), absl::OkStatus());
    ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    EXPECT_EQ(values.Download(), std::vector<float>(1000, 3.0f));
  });
}

// An abort ends a collective that waits for a peer.
TEST_F(CommunicatorOfTwoTest, AbortEndsACollectiveThatWaits) {
  const ncclUniqueId id = NewId();
  OnEachDevice(2, [&](int rank) {
    auto communicator = Communicator::Create(Options(id, rank, 2));
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    if (rank == 1) {
      absl::SleepFor(absl::Seconds(3));
      return;
    }
    const DeviceArray<float> values(std::vector<float>(1000, 1.0f));
    const ncclComm_t comm = (*communicator)->nccl();
    const ncclResult_t called =
        ncclAllReduce(values.data(), values.data(), 1000, ncclFloat, ncclSum, comm, nullptr);
    EXPECT_EQ(cuda::AwaitNccl(comm, called, absl::Now() + kLimit, "sum"), absl::OkStatus());
    EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
    const absl::Time begin = absl::Now();
    (*communicator)->Abort();
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  });
}

// --- one process a rank

// rank, num_ranks, device, what to do, id. Prints what came of it.
int RankProcess(const std::vector<std::string>& arguments) {
  const int rank = std::stoi(arguments[0]);
  const std::string& task = arguments[3];
  const std::string bytes = absl::HexStringToBytes(arguments[4]);
  ncclUniqueId id;
  std::memcpy(&id, bytes.data(), sizeof(id));
  if (cudaSetDevice(std::stoi(arguments[2])) != cudaSuccess) return 3;
  auto communicator = Communicator::Create(Options(id, rank, std::stoi(arguments[1])));
  if (!communicator.ok()) {
    std::printf("Create: %s\n", communicator.status().ToString().c_str());
    return 4;
  }
  if (!(*communicator)->mapped()) {
    std::printf("not mapped: %s\n", (*communicator)->why_not_mapped().c_str());
    return 5;
  }
  absl::Status status = (*communicator)->OpenWindow(kWindowBytes);
  if (status.ok()) status = (*communicator)->SelfTest(nullptr);
  std::printf("%s\n", status.ToString().c_str());
  // No peer writes any more.
  if (!WindowIsZero(**communicator)) return 7;
  std::fflush(stdout);
  if (task == "leave" && rank == 1) absl::SleepFor(kChildLimit);  // until it is killed
  if (task == "leave") {
    std::printf("waiting\n");
    std::fflush(stdout);
    absl::SleepFor(absl::Seconds(2));
    const absl::Time begin = absl::Now();
    if (arguments[5] == "abort") (*communicator)->Abort();
    communicator->reset();
    std::printf("torn down in %.2f s\n", absl::ToDoubleSeconds(absl::Now() - begin));
  }
  return status.ok() ? 0 : 6;
}
const RegisterChildRole kRankProcess("communicator-rank", RankProcess);

std::string Hex(const ncclUniqueId& id) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(&id), sizeof(id)));
}

using Environment = std::vector<std::pair<std::string, std::string>>;

TEST_F(CommunicatorOfTwoTest, ProcessesAreMappedIntoEachOther) {
  const std::string id = Hex(NewId());
  ChildProcess first("communicator-rank", {"0", "2", "0", "test", id});
  ChildProcess second("communicator-rank", {"1", "2", "1", "test", id});
  EXPECT_EQ(first.Wait(kChildLimit), 0) << first.Output();
  EXPECT_EQ(second.Wait(kChildLimit), 0) << second.Output();
}

TEST_F(CommunicatorOfTwoTest, ProcessesThatSeeOnlyTheirOwnDeviceAreMappedIntoEachOther) {
  const std::string id = Hex(NewId());
  ChildProcess first("communicator-rank", {"0", "2", "0", "test", id},
                     Environment{{"CUDA_VISIBLE_DEVICES", "0"}});
  ChildProcess second("communicator-rank", {"1", "2", "0", "test", id},
                      Environment{{"CUDA_VISIBLE_DEVICES", "1"}});
  EXPECT_EQ(first.Wait(kChildLimit), 0) << first.Output();
  EXPECT_EQ(second.Wait(kChildLimit), 0) << second.Output();
}

TEST_F(CommunicatorOfTwoTest, RanksOfDifferentHostsAreNotMapped) {
  const std::string id = Hex(NewId());
  ChildProcess first("communicator-rank", {"0", "2", "0", "test", id},
                     Environment{{"NCCL_HOSTID", "host-a"}, {"NCCL_P2P_DISABLE", "1"}});
  ChildProcess second("communicator-rank", {"1", "2", "1", "test", id},
                      Environment{{"NCCL_HOSTID", "host-b"}, {"NCCL_P2P_DISABLE", "1"}});
  for (ChildProcess* child : {&first, &second}) {
    EXPECT_EQ(child->Wait(kChildLimit), 5) << child->Output();
    EXPECT_THAT(child->Output(),
                AllOf(HasSubstr("not mapped: rank 1 ("), HasSubstr("is on host host-b"),
                      HasSubstr("on host host-a")));
  }
}

TEST_F(CommunicatorOfTwoTest, ARankWithoutWindowsLeavesAllUnmapped) {
  const std::string id = Hex(NewId());
  ChildProcess first("communicator-rank", {"0", "2", "0", "test", id});
  ChildProcess second("communicator-rank", {"1", "2", "1", "test", id},
                      Environment{{"NCCL_WIN_ENABLE", "0"}});
  for (ChildProcess* child : {&first, &second}) {
    EXPECT_EQ(child->Wait(kChildLimit), 5) << child->Output();
    EXPECT_THAT(child->Output(),
                AllOf(HasSubstr("not mapped: rank 1 ("), HasSubstr("NCCL_WIN_ENABLE=0")));
  }
}

TEST_F(CommunicatorOfTwoTest, TeardownDoesNotWaitForARankThatIsGone) {
  for (const std::string how : {"destroy", "abort"}) {
    const std::string id = Hex(NewId());
    ChildProcess first("communicator-rank", {"0", "2", "0", "leave", id, how});
    ChildProcess second("communicator-rank", {"1", "2", "1", "leave", id, how});
    ASSERT_TRUE(first.WaitForOutput("waiting", kChildLimit)) << first.Output();
    second.Kill();
    EXPECT_EQ(first.Wait(kChildLimit), 0) << first.Output();
    EXPECT_THAT(first.Output(), HasSubstr("torn down in ")) << how;
    std::printf("%s: %s", how.c_str(), first.Output().c_str());
  }
}

}  // namespace
}  // namespace expertd::testing
