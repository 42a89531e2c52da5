#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace expertd {

// Microseconds in buckets that are at most 1/64 of their value wide: a percentile is right to 1.6
// %, minimum, maximum and mean are exact, and the memory never grows. One thread; merge to combine.
class LatencyHistogram {
 public:
  void Add(uint64_t us);
  void Merge(const LatencyHistogram& other);

  uint64_t count() const { return count_; }
  uint64_t min_us() const { return count_ == 0 ? 0 : min_us_; }
  uint64_t max_us() const { return max_us_; }
  double mean_us() const;

  // The smallest recorded value that at least `percent` of all do not exceed, as its bucket's upper
  // end (never above max_us). 0 when empty.
  uint64_t Percentile(double percent) const;

 private:
  // Values below kLinear have a bucket each; every later power of two has kLinear / 2.
  static constexpr int kLinearBits = 7;
  static constexpr uint64_t kLinear = uint64_t{1} << kLinearBits;
  static constexpr size_t kBuckets = kLinear + (64 - kLinearBits) * (kLinear / 2);

  static size_t BucketOf(uint64_t us);
  static uint64_t UpperEnd(size_t bucket);

  std::array<uint64_t, kBuckets> counts_{};
  uint64_t count_ = 0;
  uint64_t sum_us_ = 0;
  uint64_t min_us_ = UINT64_MAX;
  uint64_t max_us_ = 0;
};

}  // namespace expertd
