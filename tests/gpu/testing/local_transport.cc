#include "tests/gpu/testing/local_transport.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device_memory.h"

namespace expertd::testing {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);

// What each rank shows the others of its current exchange. A rank begins the next exchange when all
// have copied in this one.
struct Board {
  struct Entry {
    int64_t shown = 0;   // exchanges whose sends were shown
    int64_t copied = 0;  // exchanges whose copies were enqueued
    std::vector<cuda::Transfer> sends;
    cudaEvent_t ready = nullptr;  // the sends' data is there
    cudaEvent_t done = nullptr;   // the peers' data was copied
  };

  explicit Board(int32_t num_ranks) : entries(num_ranks) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Entry> entries;  // guarded by mutex
  bool aborted = false;        // guarded by mutex
};

class LocalTransport : public cuda::RowTransport {
 public:
  LocalTransport(std::shared_ptr<Board> board, int32_t rank)
      : board_(std::move(board)), rank_(rank) {}

  int32_t rank() const override { return rank_; }
  int32_t num_ranks() const override { return static_cast<int32_t>(board_->entries.size()); }

  absl::Status Exchange(absl::Span<const cuda::Transfer> sends,
                        absl::Span<const cuda::Transfer> receives, cudaStream_t stream) override {
    ++round_;
    absl::StatusOr<cudaEvent_t> ready = Record(stream);
    if (!ready.ok()) return ready.status();
    {
      std::lock_guard lock(board_->mutex);
      Board::Entry& mine = board_->entries[rank_];
      mine.sends.assign(sends.begin(), sends.end());
      mine.ready = *ready;
      mine.shown = round_;
    }
    board_->changed.notify_all();
    if (absl::Status status = WaitForAll(&Board::Entry::shown); !status.ok()) return status;
    if (absl::Status status = Copy(receives, stream); !status.ok()) return status;
    absl::StatusOr<cudaEvent_t> done = Record(stream);
    if (!done.ok()) return done.status();
    {
      std::lock_guard lock(board_->mutex);
      board_->entries[rank_].done = *done;
      board_->entries[rank_].copied = round_;
    }
    board_->changed.notify_all();
    if (absl::Status status = WaitForAll(&Board::Entry::copied); !status.ok()) return status;
    // What this rank sent may be overwritten when the peers have it.
    std::lock_guard lock(board_->mutex);
    for (const Board::Entry& entry : board_->entries) {
      EXPERTD_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream, entry.done, 0));
    }
    return absl::OkStatus();
  }

  absl::Status Check() override { return absl::OkStatus(); }

  absl::Status Abort() override {
    std::lock_guard lock(board_->mutex);
    board_->aborted = true;
    board_->changed.notify_all();
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<cudaEvent_t> Record(cudaStream_t stream) {
    absl::StatusOr<cuda::Event> event = cuda::Event::Make();
    if (!event.ok()) return event.status();
    events_.push_back(*std::move(event));
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaEventRecord(events_.back().get(), stream));
    return events_.back().get();
  }

  absl::Status WaitForAll(int64_t Board::Entry::*counter) {
    std::unique_lock lock(board_->mutex);
    const auto all_there = [&] {
      for (const Board::Entry& entry : board_->entries) {
        if (entry.*counter < round_) return false;
      }
      return true;
    };
    board_->changed.wait_for(lock, kPatience, [&] { return board_->aborted || all_there(); });
    if (all_there()) return absl::OkStatus();
    return absl::UnavailableError("a rank did not come to the exchange");
  }

  // The n-th receive from a peer is its n-th send to this rank, empty ones left out.
  absl::Status Copy(absl::Span<const cuda::Transfer> receives, cudaStream_t stream) {
    std::lock_guard lock(board_->mutex);
    std::vector<size_t> next(board_->entries.size(), 0);
    for (const cuda::Transfer& receive : receives) {
      if (receive.bytes == 0) continue;
      const Board::Entry& peer = board_->entries[receive.peer];
      size_t& at = next[receive.peer];
      while (at < peer.sends.size() &&
             (peer.sends[at].peer != rank_ || peer.sends[at].bytes == 0)) {
        ++at;
      }
      if (at == peer.sends.size() || peer.sends[at].bytes != receive.bytes) {
        return absl::InternalError(absl::StrCat("rank ", rank_, " expects ", receive.bytes,
                                                " bytes that rank ", receive.peer,
                                                " does not send"));
      }
      EXPERTD_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream, peer.ready, 0));
      EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(receive.data, peer.sends[at].data, receive.bytes,
                                                   cudaMemcpyDeviceToDevice, stream));
      ++at;
    }
    for (int32_t q = 0; q < num_ranks(); ++q) {
      for (size_t i = next[q]; i < board_->entries[q].sends.size(); ++i) {
        const cuda::Transfer& left = board_->entries[q].sends[i];
        if (left.peer == rank_ && left.bytes > 0) {
          return absl::InternalError(absl::StrCat("rank ", q, " sends ", left.bytes,
                                                  " bytes that rank ", rank_, " does not expect"));
        }
      }
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<Board> board_;
  const int32_t rank_;
  int64_t round_ = 0;
  std::vector<cuda::Event> events_;
};

}  // namespace

std::vector<std::unique_ptr<cuda::RowTransport>> MakeLocalTransports(int32_t num_ranks) {
  auto board = std::make_shared<Board>(num_ranks);
  std::vector<std::unique_ptr<cuda::RowTransport>> transports;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    transports.push_back(std::make_unique<LocalTransport>(board, rank));
  }
  return transports;
}

}  // namespace expertd::testing
