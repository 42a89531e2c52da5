#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <string>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/device_thread.h"
#include "kernels/fatal.h"
#include "tests/gpu/testing/device.h"

namespace expertd {
namespace {

using cuda::DeviceThread;
using cuda::MemoryBlock;
using cuda::MemoryKind;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(20);

// Ends when *stop is set, or after limit_ns: a test must not leave a hung GPU behind.
__global__ void spin(const volatile uint32_t* stop, uint64_t limit_ns) {
  uint64_t start;
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (*stop == 0 && now - start < limit_ns);
}

__global__ void write_through_null() { *reinterpret_cast<volatile int*>(8) = 1; }

class DeviceThreadTest : public testing::GpuTest {
 protected:
  std::future<absl::Status> Post(DeviceThread& thread, DeviceThread::Work work,
                                 absl::Duration limit) {
    auto promise = std::make_shared<std::promise<absl::Status>>();
    thread.Post(std::move(work), limit,
                [promise](absl::Status status) { promise->set_value(std::move(status)); });
    return promise->get_future();
  }
};

DeviceThread::Work Spin(const MemoryBlock& stop, uint64_t limit_ns) {
  return
      [address = static_cast<const uint32_t*>(stop.device_data()), limit_ns](cudaStream_t stream) {
        spin<<<1, 1, 0, stream>>>(address, limit_ns);
        return EXPERTD_CUDA_STATUS(cudaGetLastError());
      };
}

TEST_F(DeviceThreadTest, JobsEndInTheOrderOfPosting) {
  auto thread = DeviceThread::Start(0, [] {});
  ASSERT_TRUE(thread.ok()) << thread.status();
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    (*thread)->Post([](cudaStream_t) { return absl::OkStatus(); }, kLong,
                    [&order, i](const absl::Status& status) {
                      EXPECT_TRUE(status.ok()) << status;
                      order.push_back(i);
                    });
  }
  ASSERT_TRUE((*thread)->Run([](cudaStream_t) { return absl::OkStatus(); }).ok());
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

TEST_F(DeviceThreadTest, AJobThatCouldNotStartFailsAloneAndInItsTurn) {
  auto thread = DeviceThread::Start(0, [] {});
  ASSERT_TRUE(thread.ok()) << thread.status();
  auto before = Post(
      **thread, [](cudaStream_t) { return absl::OkStatus(); }, kLong);
  auto wrong = Post(
      **thread,
      [](cudaStream_t) {
        return EXPERTD_CUDA_STATUS(
            cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 30));
      },
      kLong);
  auto after = Post(
      **thread, [](cudaStream_t) { return absl::OkStatus(); }, kLong);
  EXPECT_TRUE(before.get().ok());
  const absl::Status status = wrong.get();
  EXPECT_THAT(std::string(status.message()), HasSubstr("cudaFuncSetAttribute"));
  EXPECT_FALSE(IsFatal(status));
  EXPECT_TRUE(after.get().ok());
}

TEST_F(DeviceThreadTest, AJobBeyondItsLimitIsToldToStop) {
  auto stop = MemoryBlock::Allocate(MemoryKind::kPinned, 4);
  ASSERT_TRUE(stop.ok());
  *stop->as<uint32_t>() = 0;
  std::atomic<int> told = 0;
  auto thread = DeviceThread::Start(0, [&] {
    ++told;
    std::atomic_ref(*stop->as<uint32_t>()).store(1);
  });
  ASSERT_TRUE(thread.ok());
  auto job = Post(**thread, Spin(*stop, 10'000'000'000), absl::Milliseconds(50));
  EXPECT_TRUE(job.get().ok());
  EXPECT_EQ(told, 1);
  EXPECT_TRUE((*thread)->health().ok());
}

TEST_F(DeviceThreadTest, AJobThatDoesNotStopIsFatalForAllAfterIt) {
  auto stop = MemoryBlock::Allocate(MemoryKind::kPinned, 4);
  ASSERT_TRUE(stop.ok());
  *stop->as<uint32_t>() = 0;
  auto thread = DeviceThread::Start(0, [] {});
  ASSERT_TRUE(thread.ok());
  auto deaf = Post(**thread, Spin(*stop, 4'000'000'000), absl::Milliseconds(50));
  auto behind = Post(
      **thread, [](cudaStream_t) { return absl::OkStatus(); }, kLong);
  const absl::Status status = deaf.get();
  EXPECT_TRUE(IsFatal(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("did not stop when it was told to"));
  EXPECT_TRUE(IsFatal(behind.get()));
  EXPECT_TRUE(IsFatal((*thread)->health()));
  EXPECT_TRUE(IsFatal((*thread)->Run([](cudaStream_t) { return absl::OkStatus(); })));
  std::atomic_ref(*stop->as<uint32_t>()).store(1);
}

// In a process of its own: the error stays with the process.
using DeviceThreadDeathTest = DeviceThreadTest;

TEST_F(DeviceThreadDeathTest, AStickyErrorFailsEverythingAfterIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        auto thread = DeviceThread::Start(0, [] {});
        std::promise<absl::Status> first;
        (*thread)->Post(
            [](cudaStream_t stream) {
              write_through_null<<<1, 1, 0, stream>>>();
              return EXPERTD_CUDA_STATUS(cudaGetLastError());
            },
            kLong, [&](absl::Status status) { first.set_value(std::move(status)); });
        const bool fatal = IsFatal(first.get_future().get());
        const absl::Status later = (*thread)->Run([](cudaStream_t) { return absl::OkStatus(); });
        thread->reset();
        _exit(fatal && IsFatal(later) ? 70 : 1);
      },
      ::testing::ExitedWithCode(70), "");
}

}  // namespace
}  // namespace expertd
