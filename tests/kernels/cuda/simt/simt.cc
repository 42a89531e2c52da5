#include "tests/kernels/cuda/simt/simt.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>

#include "config/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace expertd::simt {
namespace {

constexpr int kWarpLanes = 32;
constexpr size_t kStackBytes = 128 << 10;
constexpr uint64_t kNsPerPass = 200;

struct Cta;
struct Warp;

struct Fiber {
  ucontext_t context = {};  // starts it; later switches are jumps, which make no system call
  jmp_buf jump;
  std::unique_ptr<uint8_t[]> stack;  // not cleared: most of it is never touched
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  Dim3 thread;
  bool finished = false;
  // Why it does not run.
  int64_t not_before = 0;  // pass
  bool (*ready)(const void*) = nullptr;
  const void* ready_context = nullptr;
  uint64_t deadline_ns = 0;  // 0: none
  bool timed_out = false;
  // Asynchronous work of the thread.
  std::vector<std::function<void()>> copies;
  std::deque<std::vector<std::function<void()>>> copy_groups;
  std::vector<std::function<void()>> group;
  std::deque<std::vector<std::function<void()>>> groups;
};

struct Warp {
  std::array<Fiber*, kWarpLanes> lanes = {};
  const char* what = nullptr;
  int arrived = 0;
  uint64_t generation = 0;
  std::array<Word4, kWarpLanes> arriving;
  std::array<std::array<Word4, kWarpLanes>, 2> results;
};

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Cta {
  Dim3 block;
  Dim3 grid;
  const std::function<void()>* kernel = nullptr;
  std::unique_ptr<uint8_t, decltype(&std::free)> shared{nullptr, &std::free};
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  std::array<Barrier, 16> barriers;
  int running = 0;  // threads that have not ended
};

// The launch that a stream is at.
struct Stream {
  const std::vector<Launch>* launches = nullptr;
  size_t next = 0;
  std::vector<std::unique_ptr<Cta>> ctas;
};

class Scheduler;
Scheduler* scheduler = nullptr;

class Scheduler {
 public:
  Scheduler(const std::vector<std::vector<Launch>>& streams, const Options& options)
      : options_(options), random_(options.seed) {
    for (const auto& launches : streams) {
      Stream& stream = streams_.emplace_back();
      stream.launches = &launches;
    }
  }

  std::string Run() {
    for (;;) {
      bool all_done = true;
      for (Stream& stream : streams_) all_done &= !Advance(stream);
      if (all_done) return error_;
      Pass();
      if (!error_.empty()) return error_;
      if (++pass_ > options_.max_passes) return "hang: the kernels did not end";
    }
  }

  Fiber& current() { return *current_; }
  uint64_t now_ns() const { return 1'000'000 + static_cast<uint64_t>(pass_) * kNsPerPass; }
  int64_t pass() const { return pass_; }

  void SwitchOut() {
    Fiber* const fiber = current_;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(fiber->finished ? nullptr : &fake_stack, main_stack_,
                                   main_stack_bytes_);
    swapcontext(&fiber->context, &main_context_);
    __sanitizer_finish_switch_fiber(fake_stack, &main_stack_, &main_stack_bytes_);
#else
    if (_setjmp(fiber->jump) == 0) _longjmp(main_jump_, 1);
#endif
  }

  void Fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
    // Nothing of the run continues; its fibers are dropped where they are.
    for (;;) SwitchOut();
  }

  void Later(std::function<void()> work) { later_.push_back(std::move(work)); }

  static void Entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler->main_stack_,
                                    &scheduler->main_stack_bytes_);
#endif
    Fiber& self = scheduler->current();
    (*self.cta->kernel)();
    self.finished = true;
    --self.cta->running;
    scheduler->SwitchOut();
  }

 private:
  // Starts the stream's next launch if the last one has ended. False: there is none.
  bool Advance(Stream& stream) {
    const bool running = std::any_of(stream.ctas.begin(), stream.ctas.end(),
                                     [](const auto& cta) { return cta->running > 0; });
    if (running) return true;
    stream.ctas.clear();
    if (stream.next == stream.launches->size()) return false;
    const Launch& launch = (*stream.launches)[stream.next++];
    for (int block = 0; block < launch.grid; ++block) {
      stream.ctas.push_back(MakeCta(launch, static_cast<uint32_t>(block)));
    }
    return true;
  }

  std::unique_ptr<Cta> MakeCta(const Launch& launch, uint32_t block) {
    auto cta = std::make_unique<Cta>();
    cta->block = {block};
    cta->grid = {static_cast<uint32_t>(launch.grid)};
    cta->kernel = &launch.kernel;
    const size_t bytes = (launch.shared_bytes + 1024) / 1024 * 1024;
    cta->shared.reset(static_cast<uint8_t*>(std::aligned_alloc(1024, bytes)));
    std::memset(cta->shared.get(), 0xff, bytes);  // shared memory is not zero: as BF16, no numbers
    cta->running = launch.block;
    EXPERTD_CHECK(launch.block % kWarpLanes == 0);
    for (int t = 0; t < launch.block; ++t) {
      if (t % kWarpLanes == 0) cta->warps.push_back(std::make_unique<Warp>());
      auto fiber = std::make_unique<Fiber>();
      fiber->cta = cta.get();
      fiber->warp = cta->warps.back().get();
      fiber->warp->lanes[t % kWarpLanes] = fiber.get();
      fiber->thread = {static_cast<uint32_t>(t)};
      cta->fibers.push_back(std::move(fiber));
    }
    return cta;
  }

  bool CanRun(Fiber& fiber) {
    if (fiber.finished || fiber.not_before > pass_) return false;
    if (fiber.ready == nullptr) return true;
    if (fiber.ready(fiber.ready_context)) {
      fiber.ready = nullptr;
      return true;
    }
    if (fiber.deadline_ns == 0 || now_ns() < fiber.deadline_ns) return false;
    fiber.ready = nullptr;
    fiber.timed_out = true;
    return true;
  }

  void Resume(Fiber& fiber) {
    [[maybe_unused]] const bool starts = fiber.stack == nullptr;
    if (starts) {
      fiber.stack = std::make_unique_for_overwrite<uint8_t[]>(kStackBytes);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, &Scheduler::Entry, 0);
    }
    current_ = &fiber;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.get(), kStackBytes);
    swapcontext(&main_context_, &fiber.context);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    if (_setjmp(main_jump_) == 0) {
      if (starts) setcontext(&fiber.context);
      _longjmp(fiber.jump, 1);
    }
#endif
    current_ = nullptr;
    if (fiber.finished) fiber.stack.reset();
  }

  // Every warp once, in random order; a warp goes on as long as its lanes let each other.
  void Pass() {
    warps_.clear();
    for (Stream& stream : streams_) {
      for (const auto& cta : stream.ctas) {
        for (const auto& warp : cta->warps) warps_.push_back(warp.get());
      }
    }
    std::shuffle(warps_.begin(), warps_.end(), random_);
    for (Warp* warp : warps_) {
      bool ran = true;
      while (ran) {
        ran = false;
        for (Fiber* fiber : warp->lanes) {
          if (!CanRun(*fiber)) continue;
          Resume(*fiber);
          ran = true;
          if (!error_.empty()) return;
        }
      }
    }
    std::vector<std::function<void()>> now;
    std::swap(now, later_);
    for (auto& work : now) {
      if (random_() % 4 == 0) {
        work();
      } else {
        later_.push_back(std::move(work));
      }
    }
  }

  const Options options_;
  std::mt19937_64 random_;
  std::vector<Stream> streams_;
  std::vector<Warp*> warps_;
  std::vector<std::function<void()>> later_;
  Fiber* current_ = nullptr;
  ucontext_t main_context_ = {};
  jmp_buf main_jump_;
  const void* main_stack_ = nullptr;
  size_t main_stack_bytes_ = 0;
  int64_t pass_ = 0;
  std::string error_;
};

Fiber& Current() { return scheduler->current(); }

struct Awaited {
  const uint64_t* generation;
  uint64_t old;
};
bool Moved(const void* context) {
  const auto* awaited = static_cast<const Awaited*>(context);
  return *awaited->generation != awaited->old;
}

}  // namespace

std::string Run(const std::vector<std::vector<Launch>>& streams, const Options& options) {
  EXPERTD_CHECK(scheduler == nullptr);
  Scheduler run(streams, options);
  scheduler = &run;
  std::string error = run.Run();
  scheduler = nullptr;
  return error;
}

const Dim3& thread_index() { return Current().thread; }
const Dim3& block_index() { return Current().cta->block; }
const Dim3& grid_size() { return Current().cta->grid; }
int lane() { return static_cast<int>(Current().thread.x) % kWarpLanes; }
uint8_t* dynamic_shared() { return Current().cta->shared.get(); }
uint64_t time_ns() { return scheduler->now_ns(); }

void Yield() {
  Current().not_before = scheduler->pass() + 1;
  scheduler->SwitchOut();
}

bool Block(bool (*ready)(const void*), const void* context, uint64_t limit_ns) {
  if (ready(context)) return true;
  Fiber& self = Current();
  self.ready = ready;
  self.ready_context = context;
  self.deadline_ns = limit_ns == 0 ? 0 : scheduler->now_ns() + limit_ns;
  self.timed_out = false;
  scheduler->SwitchOut();
  return !self.timed_out;
}

const Word4* Exchange(const char* what, const Word4& mine) {
  Warp& warp = *Current().warp;
  if (warp.arrived == 0) warp.what = what;
  if (warp.what != what) {
    scheduler->Fail(std::string("lanes of a warp meet in ") + warp.what + " and " + what);
  }
  warp.arriving[static_cast<size_t>(lane())] = mine;
  const uint64_t generation = warp.generation;
  auto& results = warp.results[generation % 2];
  if (++warp.arrived == kWarpLanes) {
    results = warp.arriving;
    warp.arrived = 0;
    ++warp.generation;
  } else {
    const Awaited awaited = {&warp.generation, generation};
    Block(&Moved, &awaited, 0);
  }
  return results.data();
}

void ArriveAtBarrier(int barrier, int threads) {
  Barrier& state = Current().cta->barriers[static_cast<size_t>(barrier)];
  if (++state.arrived < threads) return;
  state.arrived = 0;
  ++state.generation;
}

void SyncBarrier(int barrier, int threads) {
  const Barrier& state = Current().cta->barriers[static_cast<size_t>(barrier)];
  const Awaited awaited = {&state.generation, state.generation};
  ArriveAtBarrier(barrier, threads);
  Block(&Moved, &awaited, 0);
}

void SyncThreads() { SyncBarrier(0, static_cast<int>(Current().cta->fibers.size())); }

void Later(std::function<void()> work) { scheduler->Later(std::move(work)); }

void AddCopy(std::function<void()> copy) { Current().copies.push_back(std::move(copy)); }
void CommitCopies() {
  Fiber& self = Current();
  self.copy_groups.push_back(std::move(self.copies));
  self.copies.clear();
}
void FinishCopies(int pending) {
  Fiber& self = Current();
  while (self.copy_groups.size() > static_cast<size_t>(pending)) {
    for (const auto& copy : self.copy_groups.front()) copy();
    self.copy_groups.pop_front();
  }
}

void AddToGroup(std::function<void()> work) { Current().group.push_back(std::move(work)); }
void CommitGroup() {
  Fiber& self = Current();
  self.groups.push_back(std::move(self.group));
  self.group.clear();
}
void FinishGroups(int pending) {
  Fiber& self = Current();
  while (self.groups.size() > static_cast<size_t>(pending)) {
    for (const auto& work : self.groups.front()) work();
    self.groups.pop_front();
  }
}

}  // namespace expertd::simt
