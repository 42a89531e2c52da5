#include "server/latency_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace expertd {

void LatencyHistogram::Add(uint64_t us) {
  ++counts_[BucketOf(us)];
  ++count_;
  sum_us_ += us;
  min_us_ = std::min(min_us_, us);
  max_us_ = std::max(max_us_, us);
}

void LatencyHistogram::Merge(const LatencyHistogram& other) {
  for (size_t i = 0; i < kBuckets; ++i) counts_[i] += other.counts_[i];
  count_ += other.count_;
  sum_us_ += other.sum_us_;
  min_us_ = std::min(min_us_, other.min_us_);
  max_us_ = std::max(max_us_, other.max_us_);
}

double LatencyHistogram::mean_us() const {
  return count_ == 0 ? 0.0 : static_cast<double>(sum_us_) / static_cast<double>(count_);
}

uint64_t LatencyHistogram::Percentile(double percent) const {
  if (count_ == 0) return 0;
  const double wanted = std::ceil(percent / 100.0 * static_cast<double>(count_));
  const uint64_t rank = std::clamp<uint64_t>(static_cast<uint64_t>(wanted), 1, count_);
  uint64_t seen = 0;
  for (size_t i = 0; i < kBuckets; ++i) {
    seen += counts_[i];
    if (seen >= rank) return std::min(UpperEnd(i), max_us_);
  }
  return max_us_;
}

size_t LatencyHistogram::BucketOf(uint64_t us) {
  if (us < kLinear) return us;
  const int shift = std::bit_width(us) - kLinearBits;  // the top kLinearBits bits remain
  const uint64_t top = us >> shift;                    // kLinear / 2 .. kLinear - 1
  return kLinear + static_cast<size_t>(shift - 1) * (kLinear / 2) + (top - kLinear / 2);
}

uint64_t LatencyHistogram::UpperEnd(size_t bucket) {
  if (bucket < kLinear) return bucket;
  const size_t past = bucket - kLinear;
  const int shift = static_cast<int>(past / (kLinear / 2)) + 1;
  const uint64_t top = kLinear / 2 + past % (kLinear / 2);
  return ((top + 1) << shift) - 1;
}

}  // namespace expertd
