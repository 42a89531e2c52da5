#include "kernels/cpu/thread_group.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace expertd {
namespace {

TEST(ThreadGroup, EveryItemRunsOnceOnOneOfTheThreads) {
  for (const bool spin : {false, true}) {
    for (const int num_threads : {1, 2, 5}) {
      ThreadGroup group(num_threads, spin);
      EXPECT_EQ(group.num_threads(), num_threads);
      for (const int64_t num_items : {0, 1, 2, 7, 1000}) {
        std::vector<std::atomic<int>> seen(num_items);
        group.Run(num_items, [&](int64_t item, int thread) {
          EXPECT_GE(thread, 0);
          EXPECT_LT(thread, num_threads);
          ++seen[item];
        });
        for (const std::atomic<int>& count : seen) EXPECT_EQ(count, 1);
      }
    }
  }
}

TEST(ThreadGroup, WhatOneRunWroteTheNextRunReads) {
  ThreadGroup group(4, true);
  std::vector<int64_t> values(64);
  for (int64_t round = 0; round < 500; ++round) {
    group.Run(64, [&](int64_t item, int) { values[item] = round + item; });
    group.Run(64, [&](int64_t item, int) { EXPECT_EQ(values[63 - item], round + 63 - item); });
  }
}

}  // namespace
}  // namespace expertd
