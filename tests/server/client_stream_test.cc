#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/client.h"
#include "server/random_request.h"
#include "tests/testing/fake_server.h"

namespace expertd {
namespace {

using testing::FakeServer;
using ::testing::HasSubstr;
using testing::SmallLayer;
using testing::ZeroAnswer;

constexpr absl::Duration kLong = absl::Seconds(10);
constexpr absl::Duration kShort = absl::Milliseconds(100);

v1::ForwardStreamResponse Result(const v1::ForwardRequest& request) {
  v1::ForwardStreamResponse item;
  item.set_request_id(request.request_id());
  *item.mutable_result() = ZeroAnswer(request);
  return item;
}

grpc::Status Echo(grpc::ServerContext*, FakeServer::Stream* stream) {
  v1::ForwardRequest request;
  while (stream->Read(&request)) stream->Write(Result(request));
  return grpc::Status::OK;
}

class ClientStreamTest : public ::testing::Test {
 protected:
  void Open(int max_inflight) {
    auto client = Client::Connect(server_.address());
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    stream_ = client_->OpenStream(max_inflight);
  }

  absl::Status Send(uint64_t id, absl::Duration timeout = kLong) {
    v1::ForwardRequest request = MakeRandomRequest(SmallLayer(), {.tokens = 2});
    request.set_request_id(id);
    return stream_->Send(std::move(request), timeout);
  }

  FakeServer server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ForwardStream> stream_;
};

TEST_F(ClientStreamTest, EveryRequestIsAnsweredAndTheEndIsClean) {
  server_.stream = Echo;
  Open(4);
  std::thread sender([this] {
    for (uint64_t id = 1; id <= 200; ++id) EXPECT_TRUE(Send(id).ok());
    stream_->CloseSend();
  });
  std::set<uint64_t> seen;
  while (true) {
    const auto answer = stream_->Receive(kLong);
    ASSERT_TRUE(answer.ok()) << answer.status();
    if (!answer->has_value()) break;
    EXPECT_TRUE((*answer)->status.ok());
    EXPECT_EQ((*answer)->response.output().size(), 2u * 64 * 2);
    EXPECT_TRUE(seen.insert((*answer)->request_id).second);
  }
  sender.join();
  EXPECT_EQ(seen.size(), 200u);
}

TEST_F(ClientStreamTest, MoreThanTheLimitIsNeverInFlight) {
  std::atomic<int> read{0};
  server_.stream = [&read](grpc::ServerContext*, FakeServer::Stream* stream) {
    v1::ForwardRequest request;
    std::vector<v1::ForwardRequest> held;
    while (stream->Read(&request)) {
      ++read;
      held.push_back(request);
    }
    for (const auto& one : held) stream->Write(Result(one));
    return grpc::Status::OK;
  };
  Open(3);
  for (uint64_t id = 1; id <= 3; ++id) ASSERT_TRUE(Send(id).ok());
  const absl::Status fourth = Send(4, kShort);
  EXPECT_TRUE(absl::IsDeadlineExceeded(fourth)) << fourth;
  EXPECT_THAT(std::string(fourth.message()), HasSubstr("the limit is 3"));
  stream_->CloseSend();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream_->Receive(kLong)->has_value());
  EXPECT_FALSE(stream_->Receive(kLong)->has_value());
  EXPECT_EQ(read, 3);
}

TEST_F(ClientStreamTest, TheServersLimitWins) {
  server_.info.set_max_stream_inflight(2);
  server_.stream = Echo;
  Open(100);
  EXPECT_EQ(stream_->max_inflight(), 2);
}

TEST_F(ClientStreamTest, AnErrorItemIsAnAnswerAndTheStreamLives) {
  server_.stream = [](grpc::ServerContext*, FakeServer::Stream* stream) {
    v1::ForwardRequest request;
    while (stream->Read(&request)) {
      v1::ForwardStreamResponse item = Result(request);
      if (request.request_id() == 1) {
        item.mutable_error()->set_code(grpc::StatusCode::RESOURCE_EXHAUSTED);
        item.mutable_error()->set_message("queue full");
        item.mutable_error()->set_retry_pushback_ms(50);
      }
      stream->Write(item);
    }
    return grpc::Status::OK;
  };
  Open(1);
  ASSERT_TRUE(Send(1).ok());
  const auto refused = stream_->Receive(kLong);
  ASSERT_TRUE(refused.ok() && refused->has_value()) << refused.status();
  EXPECT_TRUE(absl::IsResourceExhausted((*refused)->status)) << (*refused)->status;
  EXPECT_EQ(RetryPushback((*refused)->status), absl::Milliseconds(50));
  ASSERT_TRUE(Send(2).ok());
  const auto answered = stream_->Receive(kLong);
  ASSERT_TRUE(answered.ok() && answered->has_value()) << answered.status();
  EXPECT_TRUE((*answered)->status.ok());
}

TEST_F(ClientStreamTest, AnIdInFlightIsRefused) {
  server_.stream = [](grpc::ServerContext*, FakeServer::Stream* stream) {
    v1::ForwardRequest request;
    while (stream->Read(&request)) {
    }
    return grpc::Status::OK;
  };
  Open(4);
  ASSERT_TRUE(Send(7).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Send(7)));
}

TEST_F(ClientStreamTest, ReceiveEndsWithItsTimeoutAndTheStreamLives) {
  std::atomic<bool> go{false};
  server_.stream = [&go](grpc::ServerContext* context, FakeServer::Stream* stream) {
    v1::ForwardRequest request;
    stream->Read(&request);
    while (!go && !context->IsCancelled()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    stream->Write(Result(request));
    return grpc::Status::OK;
  };
  Open(4);
  ASSERT_TRUE(Send(1).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(stream_->Receive(kShort).status()));
  go = true;
  const auto answer = stream_->Receive(kLong);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ((*answer)->request_id, 1u);
}

TEST_F(ClientStreamTest, AnAnswerToNobodyIsAnError) {
  server_.stream = [](grpc::ServerContext*, FakeServer::Stream* stream) {
    v1::ForwardRequest request;
    stream->Read(&request);
    request.set_request_id(99);
    stream->Write(Result(request));
    return grpc::Status::OK;
  };
  Open(4);
  ASSERT_TRUE(Send(1).ok());
  const auto answer = stream_->Receive(kLong);
  EXPECT_TRUE(absl::IsInternal(answer.status())) << answer.status();
  EXPECT_THAT(std::string(answer.status().message()), HasSubstr("99"));
}

TEST_F(ClientStreamTest, AStreamThatEndsTooEarlyIsUnavailableForSendAndReceive) {
  server_.stream = [](grpc::ServerContext*, FakeServer::Stream* stream) {
    v1::ForwardRequest request;
    stream->Read(&request);
    return grpc::Status::OK;
  };
  Open(4);
  ASSERT_TRUE(Send(1).ok());
  EXPECT_TRUE(absl::IsUnavailable(stream_->Receive(kLong).status()));
  EXPECT_TRUE(absl::IsUnavailable(Send(2)));
}

TEST_F(ClientStreamTest, AKilledServerEndsTheStream) {
  std::atomic<bool> reading{false};
  server_.stream = [&reading](grpc::ServerContext*, FakeServer::Stream* stream) {
    v1::ForwardRequest request;
    while (stream->Read(&request)) reading = true;
    return grpc::Status::OK;
  };
  Open(4);
  ASSERT_TRUE(Send(1).ok());
  while (!reading) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  server_.Kill();
  const auto answer = stream_->Receive(kLong);
  EXPECT_FALSE(answer.ok());
  EXPECT_FALSE(absl::IsDeadlineExceeded(answer.status())) << answer.status();
}

TEST_F(ClientStreamTest, DroppingAStreamDoesNotWaitForTheServer) {
  std::atomic<bool> started{false}, cancelled{false};
  server_.stream = [&](grpc::ServerContext* context, FakeServer::Stream*) {
    started = true;
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    cancelled = true;
    return grpc::Status::CANCELLED;
  };
  Open(4);
  ASSERT_TRUE(Send(1).ok());
  for (int i = 0; i < 1000 && !started; ++i) absl::SleepFor(absl::Milliseconds(10));
  const absl::Time start = absl::Now();
  stream_.reset();
  client_.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  for (int i = 0; i < 1000 && !cancelled; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_TRUE(cancelled);
}

TEST_F(ClientStreamTest, OpeningAndDroppingManyStreamsIsSafe) {
  server_.stream = Echo;
  Open(4);
  for (uint64_t i = 0; i < 200; ++i) {
    stream_ = client_->OpenStream(4);
    if (i % 3 != 0) {
      ASSERT_TRUE(Send(i).ok());
    }
    if (i % 5 == 0) stream_->CloseSend();
    if (i % 3 != 0 && i % 7 == 1) {
      ASSERT_TRUE(stream_->Receive(kLong).ok());
    }
  }
}

// The client goes first, so that the stream is the last owner of the channel, and gRPC's thread may
// be the last to know of the stream.
TEST_F(ClientStreamTest, AStreamMayOutliveItsClient) {
  server_.stream = Echo;
  for (int i = 0; i < 40; ++i) {
    Open(4);
    for (uint64_t id = 1; id <= 3; ++id) ASSERT_TRUE(Send(id).ok());
    client_.reset();
    if (i % 2 == 0) {
      EXPECT_TRUE(stream_->Receive(kLong).ok());
    }
    stream_.reset();
  }
}

}  // namespace
}  // namespace expertd
