#include "config/toml.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;

// "key=text key=text" of what was read, or the error.
std::string Read(const std::string& text) {
  const auto entries = toml::Parse(text, "a.toml");
  if (!entries.ok()) return std::string(entries.status().message());
  std::string result;
  for (const toml::Entry& entry : *entries) {
    if (!result.empty()) result += " ";
    result += entry.key + "=" + entry.text;
  }
  return result;
}

TEST(TomlTest, ReadsStringsIntegersAndBooleans) {
  const auto entries = toml::Parse("a = \"x\"\nb-c = 12\nD_1 = true\n", "a.toml");
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 3u);
  EXPECT_EQ((*entries)[0].type, toml::Type::kString);
  EXPECT_EQ((*entries)[1].type, toml::Type::kInteger);
  EXPECT_EQ((*entries)[2].type, toml::Type::kBoolean);
  EXPECT_EQ((*entries)[2].line, 3);
}

TEST(TomlTest, IgnoresBlankLinesCommentsAndSpace) {
  EXPECT_EQ(Read("\n# a = 1\n \t b=2 # c\r\n\r\nd = 'x # y'"), "b=2 d=x # y");
  EXPECT_EQ(Read(""), "");
}

TEST(TomlTest, IntegersMayHaveSignsAndSingleUnderscores) {
  EXPECT_EQ(Read("a = 1_000_000\nb = -7\nc = +7\nd = 0"), "a=1000000 b=-7 c=7 d=0");
  for (const char* bad :
       {"1__0", "_1", "1_", "07", "-", "0x10", "1.5", "1e3", "inf", "1979-05-27"}) {
    EXPECT_THAT(Read(std::string("a = ") + bad), HasSubstr("a.toml:1: a: got")) << bad;
  }
}

TEST(TomlTest, BasicStringsHaveEscapesLiteralOnesDoNot) {
  EXPECT_EQ(Read(R"(a = "\"\\\t\u00e9\U0001F600")"), "a=\"\\\t\u00e9\U0001F600");
  EXPECT_EQ(Read(R"(a = 'C:\dir')"), R"(a=C:\dir)");
  EXPECT_THAT(Read(R"(a = "\d")"), HasSubstr("unknown escape"));
  EXPECT_THAT(Read(R"(a = "\u12")"), HasSubstr("too few hex digits"));
  EXPECT_THAT(Read(R"(a = "\ud800")"), HasSubstr("no Unicode character"));
  EXPECT_THAT(Read(R"(a = "\)"), HasSubstr("unknown escape"));
}

TEST(TomlTest, SaysWhatIsWrongAndWhere) {
  EXPECT_THAT(Read("a = 1\nb"), HasSubstr("a.toml:2: expected = after b"));
  EXPECT_THAT(Read("= 1"), HasSubstr("expected a key"));
  EXPECT_THAT(Read("a ="), HasSubstr("a has no value"));
  EXPECT_THAT(Read("a = # 1"), HasSubstr("a has no value"));
  EXPECT_THAT(Read("a = \"x"), HasSubstr("not closed"));
  EXPECT_THAT(Read("a = 1 2"), HasSubstr("unexpected text after the value: 2"));
  EXPECT_THAT(Read("a = 1\na = 2"), HasSubstr("a.toml:2: a is given twice"));
  EXPECT_THAT(Read("a = yes"), HasSubstr("expected a quoted string"));
  EXPECT_THAT(Read(std::string("a = 'x\0y'", 9)), HasSubstr("control character"));
}

TEST(TomlTest, RefusesByNameWhatItDoesNotSupport) {
  EXPECT_THAT(Read("[serve]\na = 1"), HasSubstr("tables are not supported"));
  EXPECT_THAT(Read("a = \"\"\"x\"\"\""), HasSubstr("several lines"));
  EXPECT_THAT(Read("a = [1, 2]"), HasSubstr("expected a quoted string"));
}

TEST(TomlTest, QuotedTextReadsBack) {
  const std::string text = "a \"b\" \\ \t \n \x01 \u00e9";
  EXPECT_EQ(Read("a = " + toml::Quote(text)), "a=" + text);
}

}  // namespace
}  // namespace expertd
