#include "loader/file.h"

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;

TEST(ReadFullyTest, ShortReadsAndSignalsAreRepeated) {
  const std::string source = "0123456789";
  int call = 0;
  const ReadFunction read = [&](void* into, uint64_t bytes, uint64_t offset) -> int64_t {
    if (++call % 2 == 0) {
      errno = EINTR;
      return -1;
    }
    const uint64_t part = std::min<uint64_t>(bytes, 3);
    std::memcpy(into, source.data() + offset, part);
    return static_cast<int64_t>(part);
  };
  std::vector<uint8_t> into(8);
  ASSERT_TRUE(ReadFully(read, "x", 2, absl::MakeSpan(into)).ok());
  EXPECT_EQ(std::string(into.begin(), into.end()), "23456789");
  EXPECT_GT(call, 3);
}

TEST(ReadFullyTest, EndBeforeTheLastByteSaysWhere) {
  const ReadFunction read = [](void*, uint64_t, uint64_t offset) -> int64_t {
    return offset < 4 ? 2 : 0;
  };
  std::vector<uint8_t> into(8);
  const absl::Status status = ReadFully(read, "shard", 0, absl::MakeSpan(into));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("shard: ends at 4, expected 4 bytes more"));
}

TEST(ReadFullyTest, ErrorNamesFileAndPlace) {
  const ReadFunction read = [](void*, uint64_t, uint64_t) -> int64_t {
    errno = EIO;
    return -1;
  };
  std::vector<uint8_t> into(8);
  const absl::Status status = ReadFully(read, "shard", 16, absl::MakeSpan(into));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("shard: reading at 16"));
}

TEST(ReadSmallFileTest, LargeFileIsRefusedBeforeItIsRead) {
  testing::TempDir dir;
  testing::WriteFile(dir.path() / "f", "12345");
  EXPECT_EQ(*ReadSmallFile(dir.path() / "f", 5), "12345");
  const auto refused = ReadSmallFile(dir.path() / "f", 4);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("found 5 bytes, expected at most 4"));
}

}  // namespace
}  // namespace expertd
