// How fast LoadWeights fills the CPU backend's weights with the files in the page cache, beside
// what a plain parallel read of the same files reaches in the same run:
//   reused   each thread reads 4 MiB pieces into one buffer of its own, again and again
//   fresh    the same into memory that was never touched, as a loader's target is
//   load     Checkpoint::Open + LoadWeights into the CPU backend's own memory, scales checked
// Work = bytes read; the rates are the best of the rounds, which take turns. Peak memory beyond the
// weights = the kernel's high-water mark during the load - resident before - weight bytes.
//
//   loader_bench [--smoke] [--dir CHECKPOINT] [--threads N] [--rounds N]

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "config/check.h"
#include "kernels/backend.h"
#include "loader/checkpoint.h"
#include "loader/checkpoint_writer.h"
#include "loader/load_plan.h"
#include "loader/weight_loader.h"
#include "tests/testing/safetensors_builder.h"

namespace expertd {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPiece = 4u << 20;

struct Flags {
  bool smoke = false;
  std::string dir;
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  int rounds = 5;
};

struct Piece {
  int file;  // descriptor
  uint64_t offset;
  size_t bytes;
  size_t target;  // place in the concatenation of all files
};

// User and system time of the process so far: says more than the clock on a busy machine.
double CpuSeconds() {
  struct rusage usage;
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A line of /proc/self/status such as VmHWM, in bytes.
int64_t StatusBytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word != key + ":") continue;
    int64_t kilobytes = 0;
    status >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

void ResetHighWaterMark() { std::ofstream("/proc/self/clear_refs") << "5"; }

// target(thread, piece): where to read to.
double ReadAll(const std::vector<Piece>& pieces, int num_threads,
               const std::function<void*(int, const Piece&)>& target) {
  std::atomic<size_t> next{0};
  return Seconds([&] {
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        for (size_t i; (i = next.fetch_add(1)) < pieces.size();) {
          const Piece& piece = pieces[i];
          const ssize_t got =
              ::pread(piece.file, target(t, piece), piece.bytes, static_cast<off_t>(piece.offset));
          EXPERTD_CHECK(got == static_cast<ssize_t>(piece.bytes));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

double ReadIntoReusedBuffers(const std::vector<Piece>& pieces, int num_threads) {
  std::vector<std::vector<char>> buffers(static_cast<size_t>(num_threads),
                                         std::vector<char>(kPiece));
  return ReadAll(pieces, num_threads, [&](int thread, const Piece&) {
    return static_cast<void*>(buffers[static_cast<size_t>(thread)].data());
  });
}

double ReadIntoFreshMemory(const std::vector<Piece>& pieces, int num_threads, size_t total) {
  void* memory = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPERTD_CHECK(memory != MAP_FAILED);
  (void)::madvise(memory, total, MADV_HUGEPAGE);
  const double seconds = ReadAll(pieces, num_threads, [&](int, const Piece& piece) {
    return static_cast<void*>(static_cast<char*>(memory) + piece.target);
  });
  ::munmap(memory, total);
  return seconds;
}

struct LoadFigures {
  double open_seconds = 0;
  double load_seconds = 0;
  double load_cpu_seconds = 0;
  int64_t bytes = 0;
  int64_t extra_bytes = 0;  // peak beyond the weights
};

LoadFigures Load(const fs::path& dir, int num_threads) {
  LoadFigures figures;
  const int64_t before = StatusBytes("VmRSS");
  ResetHighWaterMark();
  absl::StatusOr<Checkpoint> checkpoint = absl::UnknownError("");
  figures.open_seconds = Seconds([&] { checkpoint = Checkpoint::Open(dir); });
  if (!checkpoint.ok()) {
    std::fprintf(stderr, "%s\n", checkpoint.status().ToString().c_str());
    std::exit(1);
  }
  const auto placement = std::make_shared<const Placement>(
      *Placement::Contiguous(checkpoint->layers()[0].num_experts, 1));
  const LoadPlan plan = MakeLoadPlan(*checkpoint, *placement, 0, 1);
  BackendOptions options;
  options.layers = checkpoint->layers();
  options.placement = placement;
  options.max_tokens_per_rank = 1;
  options.num_threads = 1;
  absl::StatusOr<std::unique_ptr<Backend>> backend = MakeCpuBackend(options);
  EXPERTD_CHECK(backend.ok());
  LoadOptions load;
  load.num_threads = num_threads;
  absl::Status status;
  const double cpu_before = CpuSeconds();
  figures.load_seconds =
      Seconds([&] { status = LoadWeights(*checkpoint, plan, (*backend)->sink(), load); });
  figures.load_cpu_seconds = CpuSeconds() - cpu_before;
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::exit(1);
  }
  figures.bytes = plan.total_bytes;
  figures.extra_bytes = StatusBytes("VmHWM") - before - (*backend)->info().weight_bytes;
  return figures;
}

Flags ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--smoke") {
      flags.smoke = true;
      flags.rounds = 1;
    } else if (flag == "--dir" && i + 1 < argc) {
      flags.dir = argv[++i];
    } else if (flag == "--threads" && i + 1 < argc) {
      flags.threads = std::max(1, std::atoi(argv[++i]));
    } else if (flag == "--rounds" && i + 1 < argc) {
      flags.rounds = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr,
                   "usage: loader_bench [--smoke] [--dir CHECKPOINT] [--threads N] [--rounds N]\n");
      std::exit(2);
    }
  }
  return flags;
}

// V4-Flash geometry, 1.7 GB in shards of 500 MB.
void Generate(const fs::path& dir, bool smoke) {
  CheckpointRequest request;
  request.dir = dir;
  if (!smoke) {
    request.hidden_size = 4096;
    request.intermediate_size = 2048;
    request.num_experts = 64;
    request.shard_bytes = 500u << 20;
  }
  const absl::Status status = WriteCheckpoint(request);
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

void Run(const Flags& flags, const fs::path& dir) {
  std::vector<Piece> pieces;
  size_t total = 0;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.path().extension() != ".safetensors") continue;
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    EXPERTD_CHECK(file >= 0);  // closed with the process
    for (uint64_t at = 0; at < entry.file_size(); at += kPiece) {
      const size_t bytes = std::min<uint64_t>(kPiece, entry.file_size() - at);
      pieces.push_back({file, at, bytes, total});
      total += bytes;
    }
  }
  ReadIntoReusedBuffers(pieces, flags.threads);  // into the page cache
  struct Best {
    double rate = 0;          // bytes/s
    double cpu_per_gb = 1e9;  // s
    void Take(double bytes, double seconds, double cpu_seconds) {
      rate = std::max(rate, bytes / seconds);
      cpu_per_gb = std::min(cpu_per_gb, cpu_seconds / (bytes / 1e9));
    }
    void Print(const char* name) const {
      std::printf("%-27s %6.2f GB/s, CPU %.3f s/GB\n", name, rate / 1e9, cpu_per_gb);
    }
  } reused, fresh, load;
  double open = 1e9;
  int64_t extra = 0;
  for (int round = 0; round < flags.rounds; ++round) {
    const auto bytes = static_cast<double>(total);
    double cpu = CpuSeconds();
    double seconds = ReadIntoReusedBuffers(pieces, flags.threads);
    reused.Take(bytes, seconds, CpuSeconds() - cpu);
    cpu = CpuSeconds();
    seconds = ReadIntoFreshMemory(pieces, flags.threads, total);
    fresh.Take(bytes, seconds, CpuSeconds() - cpu);
    const LoadFigures figures = Load(dir, flags.threads);
    load.Take(static_cast<double>(figures.bytes), figures.load_seconds, figures.load_cpu_seconds);
    open = std::min(open, figures.open_seconds);
    extra = std::max(extra, figures.extra_bytes);
  }
  std::printf("%.2f GB, %d threads, best of %d rounds\n", static_cast<double>(total) / 1e9,
              flags.threads, flags.rounds);
  reused.Print("plain read, reused buffers");
  fresh.Print("plain read, fresh memory");
  load.Print("LoadWeights");
  std::printf("ratio to reused / fresh     %6.2f / %.2f\n", load.rate / reused.rate,
              load.rate / fresh.rate);
  std::printf("Checkpoint::Open            %6.1f ms\n", open * 1e3);
  std::printf("peak beyond the weights     %6.1f MiB\n", static_cast<double>(extra) / (1 << 20));
}

}  // namespace
}  // namespace expertd

int main(int argc, char** argv) {
  const expertd::Flags flags = expertd::ParseFlags(argc, argv);
  if (!flags.dir.empty()) {
    expertd::Run(flags, flags.dir);
    return 0;
  }
  const expertd::testing::TempDir dir;
  expertd::Generate(dir.path() / "checkpoint", flags.smoke);
  expertd::Run(flags, dir.path() / "checkpoint");
  return 0;
}
