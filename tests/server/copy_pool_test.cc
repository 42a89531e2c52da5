#include "server/copy_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "config/limits.h"

namespace expertd {
namespace {

TEST(CopyPoolTest, EveryTaskRunsOnceWithAnyNumberOfHelpers) {
  for (const int32_t helpers : {0, 1, 3, 7}) {
    CopyPool pool(helpers);
    for (int round = 0; round < 200; ++round) {
      const int64_t count = round % 40;
      std::vector<std::atomic<int>> ran(count);
      pool.Run(count, limits::kParallelCopyBytes, [&](int64_t i) { ++ran[i]; });
      for (const std::atomic<int>& times : ran) ASSERT_EQ(times, 1);
    }
  }
}

TEST(CopyPoolTest, WhatTheHelpersWroteIsThereWhenRunReturns) {
  CopyPool pool(3);
  std::vector<int> values(1000);
  for (int round = 1; round < 100; ++round) {
    pool.Run(1000, limits::kParallelCopyBytes, [&](int64_t i) { values[i] = round; });
    for (const int value : values) ASSERT_EQ(value, round);
  }
}

TEST(CopyPoolTest, LittleIsMovedByTheCaller) {
  CopyPool pool(3);
  std::set<std::thread::id> threads;  // unguarded: only this thread comes here
  pool.Run(100, limits::kParallelCopyBytes - 1,
           [&](int64_t) { threads.insert(std::this_thread::get_id()); });
  EXPECT_EQ(threads, std::set<std::thread::id>{std::this_thread::get_id()});
}

}  // namespace
}  // namespace expertd
