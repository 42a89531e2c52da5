#include "loader/shard_index.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;

void ExpectRefused(const std::string& json, const std::string& field, const std::string& found,
                   const std::string& expected) {
  const auto index = ParseShardIndex(json);
  ASSERT_FALSE(index.ok()) << json;
  const std::string message(index.status().message());
  EXPECT_THAT(message, HasSubstr(field));
  EXPECT_THAT(message, HasSubstr(found));
  EXPECT_THAT(message, HasSubstr("expected"));
  EXPECT_THAT(message, HasSubstr(expected));
}

TEST(ShardIndexTest, FilesAndTensorsAreSortedAndFound) {
  const auto index = ParseShardIndex(
      R"({"metadata": {"total_size": 5, "deep": [[{"weight_map": 1}]]},
          "weight_map": {"z": "b.safetensors", "a": "b.safetensors", "k": "a.safetensors"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->files, (std::vector<std::string>{"a.safetensors", "b.safetensors"}));
  ASSERT_EQ(index->entries.size(), 3u);
  EXPECT_EQ(index->Find("a"), 0);
  EXPECT_EQ(index->entries[0].file, 1);
  EXPECT_EQ(index->Find("k"), 1);
  EXPECT_EQ(index->entries[1].file, 0);
  EXPECT_EQ(index->Find("b"), -1);
  EXPECT_EQ(index->Find("zz"), -1);
}

TEST(ShardIndexTest, PathsOutOfTheDirectoryAreRefused) {
  for (const char* file :
       {"../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\\\x.safetensors", "..",
        ".safetensors", ".hidden.safetensors", "", "x.bin", "x\\u0000.safetensors"}) {
    ExpectRefused(std::string(R"({"weight_map": {"t": ")") + file + "\"}}", "tensor t",
                  "found file", "plain file name inside the directory");
  }
}

TEST(ShardIndexTest, TensorInTwoShardsIsRefused) {
  ExpectRefused(R"({"weight_map": {"t": "a.safetensors", "t": "b.safetensors"}})", "tensor t",
                "twice (a.safetensors, b.safetensors)", "once");
  ExpectRefused(R"({"weight_map": {"t": "a.safetensors"}, "weight_map": {}})", "weight_map",
                "twice", "once");
}

TEST(ShardIndexTest, OtherStructuresAreRefused) {
  ExpectRefused("[1]", "found an array", "", "one object");
  ExpectRefused("7", "found a number", "", "one object");
  ExpectRefused("{}", "weight_map", "missing", "an object");
  ExpectRefused(R"({"weight_map": []})", "weight_map", "an array", "an object");
  ExpectRefused(R"({"weight_map": 3})", "weight_map", "a number", "an object");
  ExpectRefused(R"({"weight_map": {}})", "weight_map", "no tensor", "some");
  ExpectRefused(R"({"weight_map": {"t": 3}})", "tensor t", "a number", "a file name");
  ExpectRefused(R"({"weight_map": {"t": ["a.safetensors"]}})", "tensor t", "an array",
                "a file name");
  ExpectRefused(R"({"weight_map": {"t": {"u": "a.safetensors"}}})", "tensor t", "an object",
                "a file name");
}

TEST(ShardIndexTest, BrokenJsonIsRefused) {
  ExpectRefused(R"({"weight_map": {"t": "a.safetens)", "not valid", "", "one object");
  ExpectRefused("", "not valid", "", "one object");
  ExpectRefused(std::string("{\"weight_map\": {\"t\": \"a.safetensors\"}}\0x", 41), "NUL", "",
                "JSON text");
  ExpectRefused("{\"weight_map\": {\"t\xff\": \"a.safetensors\"}}", "not valid UTF-8", "",
                "one object");
}

}  // namespace
}  // namespace expertd
