#include "loader/progress.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// What a printer wrote.
template <typename Use>
std::string Printed(bool is_terminal, Use use) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* out = ::open_memstream(&text, &size);
  {
    ProgressPrinter printer(out, is_terminal);
    use(printer);
  }
  std::fclose(out);
  const std::string result(text, size);
  std::free(text);
  return result;
}

LoadProgress At(int64_t done, double seconds) {
  return {.bytes_done = done, .bytes_total = 10'000'000'000, .elapsed = absl::Seconds(seconds)};
}

TEST(ProgressTest, TextSaysShareRateAndTimeLeft) {
  EXPECT_EQ(ProgressText(At(2'500'000'000, 1)), " 25 %, 2.5 GB of 10.0 GB, 2.50 GB/s, 3 s left");
  EXPECT_EQ(ProgressText(At(10'000'000'000, 4)), "100 %, 10.0 GB of 10.0 GB, 2.50 GB/s, 4.0 s");
  EXPECT_THAT(ProgressText(At(0, 0)), Not(HasSubstr("left")));
}

TEST(ProgressTest, BytesHaveDecimalUnits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(999), "999 B");
  EXPECT_EQ(HumanBytes(1500), "1.5 kB");
  EXPECT_EQ(HumanBytes(999'960), "1.0 MB");
  EXPECT_EQ(HumanBytes(147'200'000'000), "147.2 GB");
}

TEST(ProgressTest, TerminalGetsOneLineThatRedraws) {
  const std::string text = Printed(true, [](ProgressPrinter& printer) {
    printer.Update(At(5'000'000'000, 1));
    printer.Update(At(10'000'000'000, 2));
    printer.Update(At(10'000'000'000, 2));
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\r'), 2);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  EXPECT_THAT(text, HasSubstr("[###############...............]  50 %"));
}

TEST(ProgressTest, BarThatNeverEndsStillLeavesTheLine) {
  const std::string text =
      Printed(true, [](ProgressPrinter& printer) { printer.Update(At(5'000'000'000, 1)); });
  EXPECT_EQ(text.back(), '\n');
}

TEST(ProgressTest, LogGetsALineEveryFiveSecondsAndTheLast) {
  const std::string text = Printed(false, [](ProgressPrinter& printer) {
    for (int i = 1; i <= 100; ++i) printer.Update(At(i * 100'000'000ll, i * 0.1));
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);  // 0.1 s, 5.1 s, 10 s
  EXPECT_THAT(text, Not(HasSubstr("\r")));
  EXPECT_THAT(text, HasSubstr("loading: 100 %"));
}

}  // namespace
}  // namespace expertd
