#include "kernels/cpu/exchange.h"

#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/check.h"

namespace expertd {
namespace {

// A rank posts views of its messages; each peer copies its own out. The post stays until every peer
// has taken its message, so the sender's memory is reused only then. One mutex guards the posts;
// the copies run outside it.
class InProcessExchange final : public Exchange {
 public:
  explicit InProcessExchange(int32_t num_ranks) : posts_(num_ranks) {
    for (Post& post : posts_) post.taken.resize(num_ranks);
  }

  int32_t num_ranks() const override { return static_cast<int32_t>(posts_.size()); }

  absl::Status AllToAll(int32_t rank, const ExchangeTag& tag,
                        absl::Span<const absl::Span<const uint8_t>> send,
                        absl::Span<const absl::Span<uint8_t>> receive,
                        absl::Span<size_t> received_bytes, absl::Time deadline) override {
    EXPERTD_CHECK(rank >= 0 && rank < num_ranks());
    EXPERTD_CHECK(send.size() == posts_.size() && receive.size() == posts_.size() &&
                  received_bytes.size() == posts_.size());
    std::unique_lock lock(mutex_);
    if (!aborted_.ok()) return aborted_;
    Publish(rank, tag, send);
    absl::Status status;
    for (int32_t i = 1; i < num_ranks() && status.ok(); ++i) {
      const int32_t peer = (rank + i) % num_ranks();  // staggered: not all copy from rank 0 first
      status = Receive(lock, rank, peer, tag, receive[peer], &received_bytes[peer], deadline);
    }
    if (status.ok()) status = AwaitTaken(lock, rank, tag, deadline);
    Withdraw(lock, rank);
    return status;
  }

  void Abort(const absl::Status& reason) override {
    std::lock_guard lock(mutex_);
    if (aborted_.ok()) aborted_ = reason;
    changed_.notify_all();
  }

 private:
  struct Post {
    bool active = false;
    bool used = false;  // tag is that of the last post
    ExchangeTag tag;
    absl::Span<const absl::Span<const uint8_t>> messages;
    std::vector<uint8_t> taken;  // [num_ranks]
    int32_t num_taken = 0;
    int32_t readers = 0;  // peers that copy at this moment
  };

  void Publish(int32_t rank, const ExchangeTag& tag,
               absl::Span<const absl::Span<const uint8_t>> send) {
    Post& post = posts_[rank];
    EXPERTD_CHECK(!post.active);
    EXPERTD_CHECK(!post.used || post.tag < tag);
    post.active = post.used = true;
    post.tag = tag;
    post.messages = send;
    post.num_taken = 0;
    std::fill(post.taken.begin(), post.taken.end(), 0);
    changed_.notify_all();
  }

  // Waits for `ready` or an abort; the sentence says who waited for whom.
  absl::Status Await(std::unique_lock<std::mutex>& lock, absl::Time deadline,
                     const std::function<bool()>& ready, const std::function<std::string()>& who) {
    const bool in_time = changed_.wait_until(lock, absl::ToChronoTime(deadline),
                                             [&] { return ready() || !aborted_.ok(); });
    if (!aborted_.ok()) return aborted_;
    if (!in_time) return absl::DeadlineExceededError(who());
    return absl::OkStatus();
  }

  absl::Status Receive(std::unique_lock<std::mutex>& lock, int32_t rank, int32_t peer,
                       const ExchangeTag& tag, absl::Span<uint8_t> into, size_t* bytes,
                       absl::Time deadline) {
    Post& post = posts_[peer];
    const auto here = [&] { return post.active && post.tag == tag; };
    const auto gone_on = [&] { return post.used && tag < post.tag; };
    const absl::Status waited = Await(
        lock, deadline, [&] { return here() || gone_on(); },
        [&] {
          return absl::StrCat(DescribeTag(tag), ": rank ", rank, " waited for the rows of rank ",
                              peer, " until the step's deadline");
        });
    if (!waited.ok()) return waited;
    if (!here()) {
      return absl::AbortedError(absl::StrCat(DescribeTag(tag), ": rank ", rank, " waits for rank ",
                                             peer, ", which has gone on to ",
                                             DescribeTag(post.tag)));
    }
    const absl::Span<const uint8_t> message = post.messages[rank];
    if (message.size() > into.size()) {
      return absl::ResourceExhaustedError(absl::StrCat(DescribeTag(tag), ": rank ", peer,
                                                       " sent rank ", rank, " ", message.size(),
                                                       " bytes, the buffer holds ", into.size()));
    }
    ++post.readers;
    lock.unlock();
    if (!message.empty()) std::memcpy(into.data(), message.data(), message.size());
    *bytes = message.size();
    lock.lock();
    --post.readers;
    post.taken[rank] = 1;
    ++post.num_taken;
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::Status AwaitTaken(std::unique_lock<std::mutex>& lock, int32_t rank, const ExchangeTag& tag,
                          absl::Time deadline) {
    const Post& post = posts_[rank];
    return Await(
        lock, deadline, [&] { return post.num_taken == num_ranks() - 1; },
        [&] {
          std::string missing;
          for (int32_t peer = 0; peer < num_ranks(); ++peer) {
            if (peer != rank && !post.taken[peer]) absl::StrAppend(&missing, " ", peer);
          }
          return absl::StrCat(DescribeTag(tag), ": rank ", rank,
                              " waited for its rows to be taken by rank", missing,
                              " until the step's deadline");
        });
  }

  // A peer inside its copy is waited for without a deadline: it is a memcpy, nothing can hold it
  // up.
  void Withdraw(std::unique_lock<std::mutex>& lock, int32_t rank) {
    Post& post = posts_[rank];
    changed_.wait(lock, [&] { return post.readers == 0; });
    post.active = false;
    post.messages = {};
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Post> posts_;  // [num_ranks]
  absl::Status aborted_;
};

}  // namespace

std::string DescribeTag(const ExchangeTag& tag) {
  return absl::StrCat("step ", tag.step, " round ", tag.round,
                      tag.phase == ExchangePhase::kDispatch ? " dispatch" : " combine");
}

std::shared_ptr<Exchange> MakeInProcessExchange(int32_t num_ranks) {
  return std::make_shared<InProcessExchange>(num_ranks);
}

}  // namespace expertd
