#include "kernels/cpu/memory_limit.h"

#include <fstream>
#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace expertd::cpu {
namespace {

namespace fs = std::filesystem;

// A folder that stands for the machine's root.
class MemoryLimitTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(::testing::TempDir()) /
            ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(root_);
    Write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:         10 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }

  void Write(const std::string& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }

  fs::path root_;
};

TEST_F(MemoryLimitTest, WithoutControlGroupsItIsTheMachine) {
  const MemoryLimit limit = ReadMemoryLimit(root_);
  EXPECT_EQ(limit.bytes, 1'024'000);
  EXPECT_EQ(limit.source, "of the machine");
}

TEST_F(MemoryLimitTest, TheSmallestGroupOnTheWayOutCounts) {
  Write("proc/self/cgroup", "0::/outer/inner\n");
  Write("sys/fs/cgroup/outer/inner/memory.max", "max\n");
  Write("sys/fs/cgroup/outer/memory.max", "5000\n");
  const MemoryLimit limit = ReadMemoryLimit(root_);
  EXPECT_EQ(limit.bytes, 5000);
  EXPECT_EQ(limit.source,
            "of the control group " + (root_ / "sys/fs/cgroup/outer/memory.max").string());
}

TEST_F(MemoryLimitTest, AContainerSeesItsOwnGroupAtTheMount) {
  Write("proc/self/cgroup", "0::/kubepods/pod7/c1\n");
  Write("sys/fs/cgroup/memory.max", "6000\n");
  EXPECT_EQ(ReadMemoryLimit(root_).bytes, 6000);
}

TEST_F(MemoryLimitTest, VersionOneIsRead) {
  Write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/c1\n0::/\n");
  Write("sys/fs/cgroup/memory/docker/c1/memory.limit_in_bytes", "7000\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(ReadMemoryLimit(root_).bytes, 7000);
}

TEST_F(MemoryLimitTest, ASystemThatTellsNothingSetsNoLimit) {
  fs::remove_all(root_);
  EXPECT_EQ(ReadMemoryLimit(root_).bytes, std::numeric_limits<int64_t>::max());
}

}  // namespace
}  // namespace expertd::cpu
