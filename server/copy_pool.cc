#include "server/copy_pool.h"

#include <algorithm>

#include "config/limits.h"

namespace expertd {

CopyPool::CopyPool(int32_t num_helpers) {
  for (int32_t i = 0; i < num_helpers; ++i) helpers_.emplace_back([this] { Help(); });
}

CopyPool::~CopyPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

int32_t CopyPool::DefaultHelpers() {
  const auto cores = static_cast<int32_t>(std::thread::hardware_concurrency());
  return std::clamp(cores / 4, 0, limits::kMaxCopyHelpers);
}

void CopyPool::Run(int64_t count, int64_t bytes, const std::function<void(int64_t)>& task) {
  if (helpers_.empty() || count < 2 || bytes < limits::kParallelCopyBytes) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::unique_lock lock(mutex_);
  task_ = &task;
  next_ = 0;
  count_ = count;
  work_.notify_all();
  Work(lock);
  done_.wait(lock, [this] { return running_ == 0; });  // a memory copy each
}

void CopyPool::Work(std::unique_lock<std::mutex>& lock) {
  while (next_ < count_) {
    const int64_t index = next_++;
    const std::function<void(int64_t)>& task = *task_;
    ++running_;
    lock.unlock();
    task(index);
    lock.lock();
    --running_;
  }
}

void CopyPool::Help() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || next_ < count_; });
    if (stopping_) return;
    Work(lock);
    if (running_ == 0) done_.notify_one();
  }
}

}  // namespace expertd
