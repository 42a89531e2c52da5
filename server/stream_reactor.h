#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "server/service.h"

namespace expertd {

// One ForwardStream. One read and one write are under way at most. A request is in flight from its
// read until its answer is ready; beyond the limit a request gets an error item, and while twice as
// many items are unwritten reading pauses, so that a client which never reads holds bounded memory.
// The stream ends when no more requests come and every one that came is answered. gRPC deletes it
// (OnDone).
class StreamReactor final
    : public grpc::ServerBidiReactor<v1::ForwardRequest, v1::ForwardStreamResponse> {
 public:
  StreamReactor(ExpertServiceImpl* service, const ServiceContext& context, absl::Time deadline);

  void Drain();  // no more requests: what is in flight is answered, then the stream ends

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // A request, until it is answered, and its answer, until that was written.
  struct Item {
    v1::ForwardRequest request;
    v1::ForwardStreamResponse response;
    std::shared_ptr<Call> call;  // none if it was refused before
    absl::Time received_at;
    absl::Time submitted_at;
  };

  void Accept(const std::shared_ptr<Item>& item);
  void Answered(const std::shared_ptr<Item>& item, const absl::Status& status);
  // Starts what can be started next and unlocks: after Finish this object may be gone.
  void Advance(std::unique_lock<std::mutex>& lock);

  ExpertServiceImpl* const service_;
  const ServiceContext& context_;
  const absl::Time deadline_;  // of the whole stream

  v1::ForwardRequest incoming_;  // belongs to the read under way

  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<const Item*, std::shared_ptr<Item>> running_;  // submitted, not answered
  std::deque<std::shared_ptr<Item>> outgoing_;  // answered, not written; the front is being written
  bool reading_ = false;
  bool writing_ = false;
  bool closed_ = false;  // no more requests come
  bool draining_ = false;
  bool broken_ = false;  // the client has gone: nothing is written any more
  bool finished_ = false;
};

}  // namespace expertd
