#include "kernels/step_memory_pool.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "config/check.h"
#include "config/limits.h"

namespace expertd {
namespace {

// Cuts the pieces of a part one after the other; without a base it only adds up.
class Cutter {
 public:
  explicit Cutter(uint8_t* base) : base_(base) {}

  template <typename T>
  T* Take(int64_t count) {
    uint8_t* const at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(at);
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 64;  // one cache line, one AVX-512 vector

  uint8_t* const base_;
  int64_t used_ = 0;
};

// Rows of F32, the larger dtype.
int64_t Cut(const StepMemoryPool::Shape& shape, uint8_t* base, RankBatch* batch) {
  const int64_t tokens = shape.max_tokens;
  Cutter cutter(base);
  batch->hidden = cutter.Take<float>(tokens * shape.hidden_size);
  batch->ids = cutter.Take<int32_t>(tokens * limits::kMaxTopK);
  batch->weights = cutter.Take<float>(tokens * limits::kMaxTopK);
  batch->row_in_request = cutter.Take<int32_t>(tokens);
  batch->output = cutter.Take<float>(tokens * shape.hidden_size);
  return cutter.used();
}

}  // namespace

int64_t StepMemoryPool::RankBytes(const Shape& shape) {
  RankBatch counted;
  return Cut(shape, nullptr, &counted);
}

StepMemoryPool::StepMemoryPool(const Shape& shape, absl::Span<const std::vector<uint8_t*>> parts)
    : entries_(parts.size()) {
  for (size_t i = 0; i < parts.size(); ++i) {
    for (uint8_t* part : parts[i]) {
      EXPERTD_CHECK(part != nullptr);
      Cut(shape, part, &entries_[i].memory.ranks.emplace_back());
    }
  }
}

absl::StatusOr<StepMemory*> StepMemoryPool::Acquire(absl::Time deadline) {
  std::unique_lock lock(mutex_);
  const auto find = [this] {
    return std::find_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.free; });
  };
  if (!released_.wait_until(lock, absl::ToChronoTime(deadline),
                            [&] { return find() != entries_.end(); })) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", entries_.size(), " step memories are in use"));
  }
  Entry& entry = *find();
  entry.free = false;
  for (RankBatch& batch : entry.memory.ranks) batch.num_tokens = 0;
  return &entry.memory;
}

void StepMemoryPool::Release(StepMemory* memory) {
  {
    std::lock_guard lock(mutex_);
    const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                    [&](const Entry& e) { return &e.memory == memory; });
    EXPERTD_CHECK(entry != entries_.end() && !entry->free);
    entry->free = true;
  }
  released_.notify_one();
}

}  // namespace expertd
