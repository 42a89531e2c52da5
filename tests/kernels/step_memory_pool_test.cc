#include "kernels/step_memory_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <vector>

#include "absl/time/clock.h"
#include "config/limits.h"

namespace expertd {
namespace {

constexpr StepMemoryPool::Shape kShape = {.max_tokens = 5, .hidden_size = 33};

class StepMemoryPoolTest : public ::testing::Test {
 protected:
  std::vector<std::vector<uint8_t*>> MakeParts() {
    std::vector<std::vector<uint8_t*>> parts(2);
    for (std::vector<uint8_t*>& ranks : parts) {
      for (int rank = 0; rank < 2; ++rank) {
        auto& bytes = bytes_.emplace_back(StepMemoryPool::RankBytes(kShape) + 64);
        const auto address = reinterpret_cast<uintptr_t>(bytes.data());
        ranks.push_back(bytes.data() + (64 - address % 64) % 64);
      }
    }
    return parts;
  }

  std::vector<std::vector<uint8_t>> bytes_;
  StepMemoryPool pool_ = StepMemoryPool(kShape, MakeParts());
};

TEST_F(StepMemoryPoolTest, PiecesHoldTheLargestStepAndDoNotOverlap) {
  StepMemory* memory = *pool_.Acquire(absl::Now());
  ASSERT_EQ(memory->ranks.size(), 2u);
  uint8_t value = 1;
  for (RankBatch& batch : memory->ranks) {
    std::memset(batch.hidden, value, 5 * 33 * 4);
    std::memset(batch.ids, value + 1, 5 * limits::kMaxTopK * 4);
    std::memset(batch.weights, value + 2, 5 * limits::kMaxTopK * 4);
    std::memset(batch.row_in_request, value + 3, 5 * 4);
    std::memset(batch.output, value + 4, 5 * 33 * 4);
    value += 5;
  }
  value = 1;
  const auto all = [&](const void* at, size_t bytes, uint8_t expected) {
    const auto* byte = static_cast<const uint8_t*>(at);
    for (size_t i = 0; i < bytes; ++i) {
      if (byte[i] != expected) return false;
    }
    return true;
  };
  for (const RankBatch& batch : memory->ranks) {
    EXPECT_TRUE(all(batch.hidden, 5 * 33 * 4, value));
    EXPECT_TRUE(all(batch.ids, 5 * limits::kMaxTopK * 4, value + 1));
    EXPECT_TRUE(all(batch.weights, 5 * limits::kMaxTopK * 4, value + 2));
    EXPECT_TRUE(all(batch.row_in_request, 5 * 4, value + 3));
    EXPECT_TRUE(all(batch.output, 5 * 33 * 4, value + 4));
    value += 5;
  }
}

TEST_F(StepMemoryPoolTest, MemoriesAreBoundedAndComeBackWithoutRows) {
  StepMemory* first = *pool_.Acquire(absl::Now());
  StepMemory* second = *pool_.Acquire(absl::Now());
  EXPECT_NE(first, second);
  const absl::Status full = pool_.Acquire(absl::Now()).status();
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_EQ(full.message(), "all 2 step memories are in use");
  first->ranks[1].num_tokens = 3;
  pool_.Release(first);
  StepMemory* again = *pool_.Acquire(absl::Now());
  EXPECT_EQ(again, first);
  EXPECT_EQ(again->ranks[1].num_tokens, 0);
}

TEST_F(StepMemoryPoolTest, AReleaseWakesWhoWaits) {
  StepMemory* first = *pool_.Acquire(absl::Now());
  ASSERT_TRUE(pool_.Acquire(absl::Now()).ok());
  auto waiting = std::async(std::launch::async,
                            [&] { return pool_.Acquire(absl::Now() + absl::Seconds(20)); });
  EXPECT_EQ(waiting.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  pool_.Release(first);
  EXPECT_EQ(*waiting.get(), first);
}

TEST_F(StepMemoryPoolTest, ReleasingTwiceEndsTheProcess) {
  StepMemory* memory = *pool_.Acquire(absl::Now());
  pool_.Release(memory);
  EXPECT_DEATH(pool_.Release(memory), "check failed");
}

}  // namespace
}  // namespace expertd
