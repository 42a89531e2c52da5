#include "server/latency_histogram.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace expertd {
namespace {

TEST(LatencyHistogramTest, EmptyIsAllZero) {
  const LatencyHistogram histogram;
  EXPECT_EQ(histogram.Percentile(50), 0u);
  EXPECT_EQ(histogram.min_us(), 0u);
  EXPECT_EQ(histogram.max_us(), 0u);
  EXPECT_EQ(histogram.mean_us(), 0.0);
}

TEST(LatencyHistogramTest, SmallValuesAreExact) {
  LatencyHistogram histogram;
  for (uint64_t us = 1; us <= 100; ++us) histogram.Add(us);
  EXPECT_EQ(histogram.Percentile(50), 50u);
  EXPECT_EQ(histogram.Percentile(90), 90u);
  EXPECT_EQ(histogram.Percentile(99), 99u);
  EXPECT_EQ(histogram.Percentile(100), 100u);
  EXPECT_EQ(histogram.Percentile(0), 1u);
  EXPECT_EQ(histogram.mean_us(), 50.5);
}

TEST(LatencyHistogramTest, PercentilesAreWithinTwoPercentOfTheSortedValues) {
  std::mt19937_64 random(1);
  std::vector<uint64_t> values;
  LatencyHistogram histogram;
  for (int i = 0; i < 20000; ++i) {
    const double exponent = std::uniform_real_distribution<double>(0, 40)(random);
    values.push_back(static_cast<uint64_t>(std::exp2(exponent)));
    histogram.Add(values.back());
  }
  std::sort(values.begin(), values.end());
  for (const double percent : {1.0, 25.0, 50.0, 90.0, 99.0, 99.9}) {
    const auto rank = static_cast<size_t>(std::ceil(percent / 100 * 20000)) - 1;
    const auto exact = static_cast<double>(values[rank]);
    const auto got = static_cast<double>(histogram.Percentile(percent));
    EXPECT_GE(got, exact) << percent;
    EXPECT_LE(got, exact * 1.016) << percent;
  }
  EXPECT_EQ(histogram.max_us(), values.back());
  EXPECT_EQ(histogram.min_us(), values.front());
}

TEST(LatencyHistogramTest, TheLargestValueHasABucket) {
  LatencyHistogram histogram;
  histogram.Add(UINT64_MAX);
  EXPECT_EQ(histogram.Percentile(50), UINT64_MAX);
}

TEST(LatencyHistogramTest, MergedEqualsAddedToOne) {
  LatencyHistogram one, two, all;
  for (uint64_t us = 1; us < 5000; us += 7) {
    (us % 2 == 0 ? one : two).Add(us);
    all.Add(us);
  }
  one.Merge(two);
  EXPECT_EQ(one.count(), all.count());
  EXPECT_EQ(one.min_us(), all.min_us());
  EXPECT_EQ(one.max_us(), all.max_us());
  EXPECT_EQ(one.mean_us(), all.mean_us());
  for (const double percent : {10.0, 50.0, 99.0}) {
    EXPECT_EQ(one.Percentile(percent), all.Percentile(percent));
  }
}

}  // namespace
}  // namespace expertd
