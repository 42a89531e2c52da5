#include "loader/safetensors.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;
using testing::SafetensorsBytes;

absl::StatusOr<std::vector<TensorInfo>> Parse(const std::string& file) {
  return ParseSafetensorsHeader(
      absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(file.data()), file.size()), file.size());
}

absl::StatusOr<std::vector<TensorInfo>> ParseHeader(const std::string& header, size_t data_bytes) {
  return Parse(SafetensorsBytes(header, std::string(data_bytes, '\0')));
}

// The message must name the field, what was found and what was expected.
void ExpectRefused(const absl::StatusOr<std::vector<TensorInfo>>& parsed, const std::string& field,
                   const std::string& found, const std::string& expected) {
  ASSERT_FALSE(parsed.ok()) << "accepted";
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(parsed.status().message());
  EXPECT_THAT(message, HasSubstr(field));
  EXPECT_THAT(message, HasSubstr("found"));
  EXPECT_THAT(message, HasSubstr(found));
  EXPECT_THAT(message, HasSubstr("expected"));
  EXPECT_THAT(message, HasSubstr(expected));
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":[", shape,
                      "],\"data_offsets\":[", offsets, "]}");
}

std::string Object(const std::vector<std::string>& entries) {
  return absl::StrCat("{", absl::StrJoin(entries, ","), "}");
}

TEST(SafetensorsTest, TensorsComeInFileOrderWhateverTheJsonOrder) {
  const auto tensors =
      ParseHeader(Object({Entry("b", "U8", "2,3", "4,10"), Entry("a", "F32", "", "0,4")}), 10);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 2u);
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_EQ((*tensors)[0].type, TensorType::kF32);
  EXPECT_TRUE((*tensors)[0].shape.empty());
  EXPECT_EQ((*tensors)[1].name, "b");
  EXPECT_EQ((*tensors)[1].bytes, 6u);
  EXPECT_EQ((*tensors)[1].offset, (*tensors)[0].offset + 4);
}

TEST(SafetensorsTest, WhitespaceAroundTheHeaderAndMetadataAreAccepted) {
  const auto tensors = ParseHeader(absl::StrCat(" \n\t{\"__metadata__\":{\"format\":\"pt\"},",
                                                Entry("a", "U8", "1", "0,1"), "}  \n "),
                                   1);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(tensors->size(), 1u);
}

TEST(SafetensorsTest, EmptyTensorsTakeNoBytes) {
  const auto tensors =
      ParseHeader(Object({Entry("b", "U8", "3", "0,3"), Entry("a", "F32", "0,7", "0,0")}), 3);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(tensors->size(), 2u);
}

TEST(SafetensorsTest, EveryTypeOfTheFormatHasItsSize) {
  const std::pair<const char*, int> types[] = {
      {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"U16", 16},    {"I16", 16},    {"F16", 16},    {"BF16", 16},
      {"U32", 32},        {"I32", 32},    {"F32", 32},    {"U64", 64},    {"I64", 64},
      {"F64", 64},        {"C64", 64}};
  for (const auto& [name, bits] : types) {
    const size_t bytes = static_cast<size_t>(bits) * 8 / 8;  // of 8 values
    const auto tensors =
        ParseHeader(Object({Entry("a", name, "8", "0," + std::to_string(bytes))}), bytes);
    ASSERT_TRUE(tensors.ok()) << name << ": " << tensors.status();
    EXPECT_EQ(TensorTypeName((*tensors)[0].type), name);
    EXPECT_EQ(TensorTypeBits((*tensors)[0].type), bits);
  }
}

TEST(SafetensorsTest, FileShorterThanItsLengthFieldIsRefused) {
  ExpectRefused(Parse("abc"), "file length", "3 bytes", "at least 8");
}

TEST(SafetensorsTest, HeaderLongerThanTheFileIsRefused) {
  std::string file = SafetensorsBytes("{}");
  file[0] = 3;
  ExpectRefused(Parse(file), "header length", "3", "at most 2");
}

TEST(SafetensorsTest, HeaderLongerThanTheFormatAllowsIsRefusedBeforeAllocating) {
  const std::string length = {'\x01', '\xe1', '\xf5', '\x05', 0, 0, 0, 0};  // 100,000,001
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(length.data()), 8);
  ExpectRefused(ParseSafetensorsHeader(bytes, 1ull << 40), "header length", "100000001",
                "100000000");
  const std::string huge(8, '\xff');
  ExpectRefused(ParseSafetensorsHeader(
                    absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(huge.data()), 8), 1 << 20),
                "header length", "18446744073709551615", "100000000");
}

TEST(SafetensorsTest, EmptyHeaderIsRefused) {
  ExpectRefused(ParseHeader("", 0), "header", "no opening brace", "JSON object");
}

TEST(SafetensorsTest, TextThatIsNotUtf8IsRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a\xff", "U8", "1", "0,1")}), 1), "header",
                "not valid UTF-8", "JSON object");
}

TEST(SafetensorsTest, ByteOrderMarkIsRefused) {
  ExpectRefused(ParseHeader("\xef\xbb\xbf{}", 0), "header", "no opening brace", "JSON object");
}

TEST(SafetensorsTest, TruncatedJsonIsRefused) {
  const std::string header = Object({Entry("a", "U8", "1", "0,1")});
  for (size_t length = 1; length < header.size(); ++length) {
    EXPECT_FALSE(ParseHeader(header.substr(0, length), 1).ok()) << header.substr(0, length);
  }
  ExpectRefused(ParseHeader(header.substr(0, 20), 1), "header", "not valid UTF-8 JSON", "object");
}

TEST(SafetensorsTest, TextBehindTheObjectIsRefused) {
  EXPECT_FALSE(ParseHeader("{} x", 0).ok());
  EXPECT_FALSE(ParseHeader("{}{}", 0).ok());
  ExpectRefused(ParseHeader(std::string("{}\0{", 4), 0), "header", "NUL", "JSON text");
}

TEST(SafetensorsTest, DuplicateNamesAreRefused) {
  ExpectRefused(
      ParseHeader(Object({Entry("same", "U8", "1", "0,1"), Entry("same", "U8", "1", "1,2")}), 2),
      "tensor same: name", "twice", "once");
  ExpectRefused(ParseHeader("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],"
                            "\"data_offsets\":[0,1]}}",
                            1),
                "tensor a: dtype", "twice", "once");
  ExpectRefused(ParseHeader("{\"__metadata__\":{},\"__metadata__\":{}}", 0), "__metadata__",
                "twice", "once");
}

TEST(SafetensorsTest, NulInANameIsRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a\\u0000b", "U8", "1", "0,1")}), 1), "name",
                "NUL character", "none");
}

TEST(SafetensorsTest, OverlappingOffsetsAreRefused) {
  ExpectRefused(
      ParseHeader(Object({Entry("a", "U8", "4", "0,4"), Entry("b", "U8", "4", "2,6")}), 6),
      "tensor b: data_offsets", "[2, 6]", "begin 4");
}

TEST(SafetensorsTest, GappedOffsetsAreRefused) {
  ExpectRefused(
      ParseHeader(Object({Entry("a", "U8", "4", "0,4"), Entry("b", "U8", "4", "5,9")}), 9),
      "tensor b: data_offsets", "[5, 9]", "begin 4");
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "4", "1,5")}), 5), "tensor a: data_offsets",
                "[1, 5]", "begin 0");
}

TEST(SafetensorsTest, EndBeforeBeginIsRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "0", "0,0"), Entry("b", "U8", "4", "0,4"),
                                    Entry("c", "U8", "1", "4,3")}),
                            4),
                "tensor c: data_offsets", "[4, 3]", "end >= begin");
}

TEST(SafetensorsTest, SizeThatIsNotShapeTimesTypeIsRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a", "BF16", "2,3", "0,6")}), 6),
                "tensor a: data_offsets", "6 bytes", "12 for BF16 [2, 3]");
}

TEST(SafetensorsTest, OverflowByShapeIsRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "4294967296,4294967296", "0,0")}), 0),
                "tensor a: shape", "[4294967296, 4294967296]", "below 2^64");
}

TEST(SafetensorsTest, OverflowByShapeTimesTypeIsRefused) {
  // 2^61 values of 64 bits: the count fits, the bits do not.
  ExpectRefused(ParseHeader(Object({Entry("a", "F64", "2305843009213693952", "0,0")}), 0),
                "tensor a: shape", "2305843009213693952", "below 2^64");
  EXPECT_FALSE(ParseHeader(Object({Entry("a", "U8", "18446744073709551616", "0,0")}), 0).ok());
}

TEST(SafetensorsTest, OddCountOfFp4ValuesIsRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a", "F4", "3,5", "0,8")}), 8), "tensor a: shape",
                "[3, 5] of F4 = 60 bits", "whole bytes");
  EXPECT_TRUE(ParseHeader(Object({Entry("a", "F4", "3,6", "0,9")}), 9).ok());
}

TEST(SafetensorsTest, TrailingBytesAreRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "4", "0,4")}), 5), "file length", "bytes",
                "4 (end of the last tensor)");
}

TEST(SafetensorsTest, MissingDataIsRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "4", "0,4")}), 3), "file length", "bytes",
                "4 (end of the last tensor)");
}

TEST(SafetensorsTest, UnknownTypeIsRefused) {
  ExpectRefused(ParseHeader(Object({Entry("a", "F5", "1", "0,1")}), 1), "tensor a: dtype", "\"F5\"",
                "a type of the format");
}

TEST(SafetensorsTest, EntriesOfAnotherStructureAreRefused) {
  ExpectRefused(ParseHeader("{\"a\":7}", 0), "tensor a", "7", "an object");
  ExpectRefused(ParseHeader("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 0), "tensor a",
                "no data_offsets", "dtype, shape and data_offsets");
  ExpectRefused(ParseHeader("{\"a\":{\"extra\":1}}", 0), "tensor a", "extra", "dtype, shape");
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "-1", "0,1")}), 1), "tensor a: shape", "-1",
                "whole numbers");
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "1.5", "0,1")}), 1), "tensor a: shape", "1.5",
                "whole numbers");
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "[1]", "0,1")}), 1), "tensor a: shape",
                "an array", "whole numbers");
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "1", "0")}), 1), "tensor a: data_offsets",
                "1 numbers", "2");
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", "1", "0,1,2")}), 1), "tensor a: data_offsets",
                "2", "two whole numbers");
  ExpectRefused(ParseHeader("{\"a\":{\"dtype\":8}}", 1), "tensor a: dtype", "8", "a string");
  ExpectRefused(ParseHeader("{\"__metadata__\":{\"x\":1}}", 0), "__metadata__", "1", "strings");
  ExpectRefused(ParseHeader("{\"__metadata__\":\"x\"}", 0), "__metadata__", "a string",
                "an object");
}

TEST(SafetensorsTest, MoreDimensionsThanAnyTensorHasAreRefused) {
  std::string shape = "1";
  for (int i = 0; i < 40; ++i) shape += ",1";
  ExpectRefused(ParseHeader(Object({Entry("a", "U8", shape, "0,1")}), 1), "tensor a: shape",
                "more than 32", "at most");
}

TEST(SafetensorsTest, ReaderTakesTheHeaderOfAFile) {
  testing::TempDir dir;
  testing::WriteFile(dir.path() / "x.safetensors", SafetensorsBytes({{"a", {"U8", {3}, "xyz"}}}));
  const auto header = ReadSafetensorsHeader(dir.path() / "x.safetensors");
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->tensors.size(), 1u);
  EXPECT_EQ(header->identity.bytes, header->tensors[0].offset + 3);
  EXPECT_EQ(ReadSafetensorsHeader(dir.path() / "none").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_FALSE(ReadSafetensorsHeader(dir.path()).ok());
}

}  // namespace
}  // namespace expertd
