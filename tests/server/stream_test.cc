// ForwardStream against the real server in this process.
#include <gmock/gmock.h>

#include <map>

#include "absl/time/clock.h"
#include "grpcpp/create_channel_posix.h"
#include "gtest/gtest.h"
#include "tests/testing/tcp_connection.h"
#include "tests/testing/test_server.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;

// One stream; reads block.
class Stream {
 public:
  explicit Stream(v1::ExpertService::Stub& stub) {
    TestServer::Deadline(context_);
    stream_ = stub.ForwardStream(&context_);
  }
  explicit Stream(const TestServer& server) : Stream(*server.experts) {}

  bool Send(uint64_t id, v1::ForwardRequest request) {
    request.set_request_id(id);
    return stream_->Write(request);
  }
  v1::ForwardStreamResponse Read() {
    v1::ForwardStreamResponse response;
    EXPECT_TRUE(stream_->Read(&response));
    return response;
  }
  void CloseSend() { stream_->WritesDone(); }
  bool AtEnd() {
    v1::ForwardStreamResponse response;
    return !stream_->Read(&response);
  }
  grpc::Status Finish() { return stream_->Finish(); }
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardStreamResponse>> stream_;
};

// Two requests whose steps do not end: what comes now stays in the queue.
class Occupied {
 public:
  explicit Occupied(TestServer& server) : server_(server) {
    server.gate->HoldSteps();
    first_ = std::make_unique<AsyncForward>(server, SmallRequest());
    EXPECT_TRUE(server.gate->WaitForEnded(1));
    second_ = std::make_unique<AsyncForward>(server, SmallRequest(2, 1));
    EXPECT_TRUE(server.gate->WaitForEnded(2));
  }
  ~Occupied() {
    server_.gate->Release();
    EXPECT_TRUE(first_->Wait().ok());
    EXPECT_TRUE(second_->Wait().ok());
  }

 private:
  TestServer& server_;
  std::unique_ptr<AsyncForward> first_, second_;
};

TEST(ForwardStream, AnswersCarryTheIdsAndTheBitsOfUnaryCalls) {
  TestServer server;
  Stream stream(server);
  for (uint64_t id = 1; id <= 8; ++id) {
    ASSERT_TRUE(stream.Send(id, SmallRequest(static_cast<int32_t>(id), id % 2)));
  }
  std::map<uint64_t, v1::ForwardResponse> answers;
  for (int i = 0; i < 8; ++i) {
    const v1::ForwardStreamResponse response = stream.Read();
    ASSERT_TRUE(response.has_result()) << response.error().message();
    EXPECT_EQ(response.result().request_id(), response.request_id());
    answers[response.request_id()] = response.result();
  }
  ASSERT_EQ(answers.size(), 8u);
  for (const auto& [id, answer] : answers) {
    v1::ForwardResponse unary;
    ASSERT_TRUE(server.Forward(SmallRequest(static_cast<int32_t>(id), id % 2), &unary).ok());
    EXPECT_TRUE(std::equal(unary.output_values().begin(), unary.output_values().end(),
                           answer.output_values().begin(), answer.output_values().end()));
  }
  stream.CloseSend();
  EXPECT_TRUE(stream.AtEnd());
  EXPECT_TRUE(stream.Finish().ok());
}

TEST(ForwardStream, AFailingRequestGetsAnErrorItemAndTheStreamLives) {
  TestServer server;
  Stream stream(server);
  v1::ForwardRequest bad = SmallRequest();
  bad.set_hidden_size(1);
  ASSERT_TRUE(stream.Send(5, bad));
  const v1::ForwardStreamResponse error = stream.Read();
  EXPECT_EQ(error.request_id(), 5u);
  EXPECT_EQ(error.error().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(error.error().message(), HasSubstr("hidden_size: found 1, expected 256"));
  ASSERT_TRUE(stream.Send(6, SmallRequest()));
  EXPECT_TRUE(stream.Read().has_result());
}

TEST(ForwardStream, AfterHalfCloseEverythingReadIsAnswered) {
  TestServer server;
  server.gate->HoldSteps();
  Stream stream(server);
  for (uint64_t id = 0; id < 5; ++id) ASSERT_TRUE(stream.Send(id, SmallRequest(1, id % 2)));
  stream.CloseSend();
  ASSERT_TRUE(server.gate->WaitForEnded(2));
  server.gate->Release();
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(stream.Read().has_result());
  EXPECT_TRUE(stream.AtEnd());
  EXPECT_TRUE(stream.Finish().ok());
}

TEST(ForwardStream, ATimeoutThatPassesInTheQueueIsAnErrorItem) {
  TestServer server;
  Stream stream(server);
  {
    Occupied occupied(server);
    v1::ForwardRequest request = SmallRequest();
    request.set_timeout_ms(50);
    ASSERT_TRUE(stream.Send(9, request));
    const v1::ForwardStreamResponse expired = stream.Read();  // although both steps still run
    EXPECT_EQ(expired.request_id(), 9u);
    EXPECT_EQ(expired.error().code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_TRUE(TestServer::WaitFor([&] { return server.app->metrics().expired_in_queue() == 1; }));
  }
  ASSERT_TRUE(stream.Send(10, SmallRequest()));
  EXPECT_TRUE(stream.Read().has_result());
}

TEST(ForwardStream, MoreThanTheInflightLimitIsAnErrorItem) {
  ServerConfig config = TestServer::Config(2);
  config.max_stream_inflight = 2;
  TestServer server(config);
  Stream stream(server);
  {
    Occupied occupied(server);
    for (uint64_t id = 1; id <= 3; ++id) ASSERT_TRUE(stream.Send(id, SmallRequest()));
    const v1::ForwardStreamResponse refused = stream.Read();
    EXPECT_EQ(refused.request_id(), 3u);
    EXPECT_EQ(refused.error().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(refused.error().message(), HasSubstr("more than 2"));
  }
  EXPECT_TRUE(stream.Read().has_result());
  EXPECT_TRUE(stream.Read().has_result());
}

TEST(ForwardStream, AFullQueueIsAnErrorItemWithAPushback) {
  ServerConfig config = TestServer::Config(2);
  config.max_queued_requests = 1;
  TestServer server(config);
  Stream stream(server);
  {
    Occupied occupied(server);
    ASSERT_TRUE(stream.Send(1, SmallRequest()));
    ASSERT_TRUE(stream.Send(2, SmallRequest()));
    const v1::ForwardStreamResponse refused = stream.Read();
    EXPECT_EQ(refused.request_id(), 2u);
    EXPECT_EQ(refused.error().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_GT(refused.error().retry_pushback_ms(), 0u);
  }
  EXPECT_TRUE(stream.Read().has_result());
}

TEST(ForwardStream, AClientThatDoesNotReadIsNotReadFromWithoutEnd) {
  ServerConfig config = TestServer::Config(2);
  config.max_stream_inflight = 2;
  TestServer server(config);
  Stream stream(server);
  v1::ForwardRequest large = SmallRequest(64);
  constexpr int kSent = 40;
  std::thread sender([&] {
    for (uint64_t id = 0; id < kSent; ++id) EXPECT_TRUE(stream.Send(id, large));
    stream.CloseSend();
  });
  absl::SleepFor(absl::Milliseconds(200));
  const int64_t one = 64 * (256 * 8 + 2 * 8);
  EXPECT_LE(server.app->engine().inflight_bytes(), 8 * one);
  for (int i = 0; i < kSent; ++i) stream.Read();  // answers and refusals: each request has its item
  sender.join();
  EXPECT_TRUE(stream.AtEnd());
  EXPECT_TRUE(stream.Finish().ok());
}

TEST(ForwardStream, AFaultIsAnErrorItemEachAndTheStreamLives) {
  TestServer server;
  Stream stream(server);
  server.gate->FailNext(absl::InternalError("rank 0 did not answer"));
  ASSERT_TRUE(stream.Send(1, SmallRequest()));
  const v1::ForwardStreamResponse failed = stream.Read();
  EXPECT_EQ(failed.error().code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(failed.error().message(), HasSubstr("rank 0 did not answer"));
  ASSERT_TRUE(
      TestServer::WaitFor([&] { return server.app->state().state() == v1::STATE_SERVING; }));
  ASSERT_TRUE(stream.Send(2, SmallRequest()));
  EXPECT_TRUE(stream.Read().has_result());
}

TEST(ForwardStream, ACancelledStreamFreesItsQueueEntries) {
  TestServer server;
  Occupied occupied(server);
  Stream stream(server);
  for (uint64_t id = 0; id < 4; ++id) ASSERT_TRUE(stream.Send(id, SmallRequest()));
  ASSERT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 4; }));
  stream.Cancel();
  EXPECT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 0; }));
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(server.app->metrics().cancelled_in_queue(), 4u);
}

TEST(ForwardStream, AClientWhoseConnectionBreaksFreesItsQueueEntries) {
  TestServer server;
  Occupied occupied(server);
  const int socket = ConnectTcp(server.address);
  auto stub = v1::ExpertService::NewStub(grpc::CreateInsecureChannelFromFd("test", socket));
  Stream stream(*stub);
  for (uint64_t id = 0; id < 3; ++id) ASSERT_TRUE(stream.Send(id, SmallRequest()));
  ASSERT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 3; }));
  shutdown(socket, SHUT_RDWR);
  EXPECT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 0; }));
  EXPECT_FALSE(stream.Finish().ok());
}

TEST(ForwardStream, DrainingAnswersWhatRunsAndEndsIdleStreams) {
  TestServer server;
  Stream idle(server), busy(server);
  ASSERT_TRUE(idle.Send(1, SmallRequest()));
  EXPECT_TRUE(idle.Read().has_result());
  server.gate->HoldSteps();
  ASSERT_TRUE(busy.Send(2, SmallRequest()));
  ASSERT_TRUE(server.gate->WaitForEnded(2));
  std::thread shutdown([&] { server.app->Shutdown(absl::Now() + absl::Seconds(20)); });
  EXPECT_TRUE(idle.AtEnd());
  const grpc::Status ended = idle.Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(ended.error_message(), HasSubstr("draining"));
  server.gate->Release();
  EXPECT_TRUE(busy.Read().has_result());
  EXPECT_TRUE(busy.AtEnd());
  shutdown.join();
}

}  // namespace
}  // namespace expertd
