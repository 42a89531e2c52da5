#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Runs CUDA kernels on the CPU, thread for thread, so that their logic is tested where there is no
// GPU: every thread is a fiber, warps meet in their collectives, CTAs in their barriers, and
// kernels of several ranks run side by side in an order that a seed decides. Copies and
// multiplications that are asynchronous on the GPU happen as late as the kernel allows. What it
// does not show: weak memory ordering (stores are visible at once, in order), races inside a warp,
// speed.
//
// The instructions are in include/, which shadows kernels/cuda/ptx when a kernel is compiled for
// it.
namespace expertd::simt {

struct Dim3 {
  uint32_t x = 0;
};

// One kernel launch: `kernel` is run by grid * block threads.
struct Launch {
  std::function<void()> kernel;
  int grid = 1;
  int block = 32;
  size_t shared_bytes = 0;
};

struct Options {
  uint64_t seed = 1;
  int64_t max_passes = 1'000'000;  // over all warps; then it is a hang
};

// Runs the launches of each stream one after the other and the streams side by side. Returns an
// empty string, or what went wrong: a hang, or lanes of a warp that met in different collectives.
std::string Run(const std::vector<std::vector<Launch>>& streams, const Options& options);

// --- what the instructions are made of; only inside a kernel

const Dim3& thread_index();
const Dim3& block_index();
const Dim3& grid_size();
int lane();
uint8_t* dynamic_shared();  // of the CTA, aligned to 1024 bytes

// Virtual time: advances as threads take turns.
uint64_t time_ns();

// Lets others run first.
void Yield();
// Blocks until ready(context) or, if `limit_ns` > 0, that much time has passed. False: time is up.
bool Block(bool (*ready)(const void* context), const void* context, uint64_t limit_ns);

// What the lanes of a warp show each other in a collective.
struct Word4 {
  uint32_t word[4];
};
// Every lane gives a value and gets those of all 32; `what` names the collective.
const Word4* Exchange(const char* what, const Word4& mine);

void SyncThreads();
void SyncBarrier(int barrier, int threads);
void ArriveAtBarrier(int barrier, int threads);  // and does not wait

// Done some time later, at the latest when nothing else can run.
void Later(std::function<void()> work);

// This thread's copies, in groups: done by FinishCopies, but for the last `pending`.
void AddCopy(std::function<void()> copy);
void CommitCopies();
void FinishCopies(int pending);

// This thread's multiplications, in groups: done by FinishGroups, but for the last `pending`.
void AddToGroup(std::function<void()> work);
void CommitGroup();
void FinishGroups(int pending);

}  // namespace expertd::simt
