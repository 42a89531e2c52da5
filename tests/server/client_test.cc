#include "server/client.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/random_request.h"
#include "tests/testing/fake_server.h"

namespace expertd {
namespace {

using testing::FakeServer;
using ::testing::HasSubstr;
using testing::SmallLayer;
using testing::ZeroAnswer;

constexpr char kPushback[] = "grpc-retry-pushback-ms";

grpc::Status Refuse(grpc::ServerContext* context, grpc::StatusCode code, const char* pushback_ms) {
  if (pushback_ms != nullptr) context->AddTrailingMetadata(kPushback, pushback_ms);
  return grpc::Status(code, "come back later");
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

class ClientTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect() {
    auto client = Client::Connect(server_.address());
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // Refuses the first `refusals` calls, then answers.
  void RefuseFirst(int refusals, grpc::StatusCode code, const char* pushback_ms) {
    server_.forward = [=, this](grpc::ServerContext* context, const v1::ForwardRequest& request,
                                v1::ForwardResponse* response) {
      if (++calls_ <= refusals) return Refuse(context, code, pushback_ms);
      *response = ZeroAnswer(request);
      return grpc::Status::OK;
    };
  }

  FakeServer server_;
  v1::ForwardRequest request_ = MakeRandomRequest(SmallLayer(), {.tokens = 3});
  v1::ForwardResponse response_;
  std::atomic<int> calls_{0};
};

TEST_F(ClientTest, ForwardAnswers) {
  RefuseFirst(0, grpc::StatusCode::OK, nullptr);
  const absl::Status status = Connect()->Forward(request_, {}, &response_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(response_.output().size(), 3u * 64 * 2);
}

TEST_F(ClientTest, AnswersAboveTheDefaultCapOfGrpcArrive) {
  constexpr int kBytes = 6 << 20;  // gRPC's own default is 4 MB
  server_.forward = [](auto*, const auto&, v1::ForwardResponse* response) {
    response->set_output(std::string(kBytes, 'x'));
    return grpc::Status::OK;
  };
  const absl::Status status = Connect()->Forward(request_, {}, &response_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(response_.output().size(), static_cast<size_t>(kBytes));
}

TEST_F(ClientTest, AnswersAboveTheServersOwnCapAreRefusedAndNotRetried) {
  server_.info.set_max_message_bytes(1 << 20);
  server_.forward = [this](auto*, const auto&, v1::ForwardResponse* response) {
    ++calls_;
    response->set_output(std::string(2 << 20, 'x'));
    return grpc::Status::OK;
  };
  const absl::Status status = Connect()->Forward(request_, {}, &response_);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(calls_, 1);
}

TEST_F(ClientTest, UnavailableIsRetriedUntilItAnswers) {
  RefuseFirst(3, grpc::StatusCode::UNAVAILABLE, nullptr);
  const absl::Status status = Connect()->Forward(request_, {}, &response_);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(calls_, 4);
}

TEST_F(ClientTest, AttemptsAreBounded) {
  RefuseFirst(1000, grpc::StatusCode::UNAVAILABLE, "0");
  const absl::Status status =
      Connect()->Forward(request_, {.timeout = absl::Seconds(10), .max_attempts = 3}, &response_);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(Message(status), HasSubstr("come back later"));
  EXPECT_EQ(calls_, 3);
}

TEST_F(ClientTest, ThePushbackIsWaitedFor) {
  RefuseFirst(1, grpc::StatusCode::RESOURCE_EXHAUSTED, "200");
  const auto client = Connect();
  const absl::Time start = absl::Now();
  const absl::Status status = client->Forward(request_, {}, &response_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(calls_, 2);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(200));
}

TEST_F(ClientTest, APushbackBeyondTheDeadlineEndsTheCallAtOnce) {
  RefuseFirst(1000, grpc::StatusCode::UNAVAILABLE, "60000");
  const auto client = Connect();
  const absl::Time start = absl::Now();
  const absl::Status status = client->Forward(request_, {.timeout = absl::Seconds(8)}, &response_);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(RetryPushback(status), absl::Seconds(60));
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
  EXPECT_EQ(calls_, 1);
}

TEST_F(ClientTest, NegativeOrUnreadablePushbacksForbidARetry) {
  for (const char* pushback : {"-1", "soon", "5s"}) {
    calls_ = 0;
    RefuseFirst(1000, grpc::StatusCode::UNAVAILABLE, pushback);
    const absl::Status status = Connect()->Forward(request_, {}, &response_);
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(RetryPushback(status), absl::InfiniteDuration()) << pushback;
    EXPECT_EQ(calls_, 1) << pushback;
  }
}

TEST_F(ClientTest, ResourceExhaustedWithoutPushbackIsNotRetried) {
  RefuseFirst(1000, grpc::StatusCode::RESOURCE_EXHAUSTED, nullptr);
  const absl::Status status = Connect()->Forward(request_, {}, &response_);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(RetryPushback(status), std::nullopt);
  EXPECT_EQ(calls_, 1);
}

TEST_F(ClientTest, WrongRequestsAreNotRetried) {
  RefuseFirst(1000, grpc::StatusCode::INVALID_ARGUMENT, "0");
  const absl::Status status = Connect()->Forward(request_, {}, &response_);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(calls_, 1);
}

TEST_F(ClientTest, TheTimeoutCoversAllAttempts) {
  RefuseFirst(1000, grpc::StatusCode::UNAVAILABLE, "100");
  const auto client = Connect();
  const absl::Time start = absl::Now();
  const absl::Status status = client->Forward(
      request_, {.timeout = absl::Milliseconds(350), .max_attempts = 100}, &response_);
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) << status;
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  EXPECT_GE(calls_, 2);
  EXPECT_LE(calls_, 4);
}

TEST_F(ClientTest, ASilentServerEndsInDeadlineExceeded) {
  server_.forward = [](grpc::ServerContext* context, const auto&, auto*) {
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return grpc::Status::CANCELLED;
  };
  const absl::Status status =
      Connect()->Forward(request_, {.timeout = absl::Milliseconds(100)}, &response_);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
}

TEST_F(ClientTest, ALostConnectionIsNotReachable) {
  RefuseFirst(0, grpc::StatusCode::OK, nullptr);
  const auto client = Connect();
  EXPECT_TRUE(client->IsReachable(absl::Seconds(2)));
  server_.Kill();
  EXPECT_TRUE(absl::IsUnavailable(client->Forward(request_, {absl::Seconds(2), 1}, &response_)));
  EXPECT_FALSE(client->IsReachable(absl::Seconds(2)));
}

TEST(ClientConnectTest, ARefusedConnectionIsUnavailableAtOnceAndSaysWhere) {
  const absl::Time start = absl::Now();
  const auto client = Client::Connect("127.0.0.1:1", {.connect_timeout = absl::Seconds(8)});
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  EXPECT_THAT(Message(client.status()), HasSubstr("cannot reach 127.0.0.1:1"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
}

TEST(ClientConnectTest, WaitingForTheServerEndsWithTheTimeout) {
  const absl::Time start = absl::Now();
  const auto client = Client::Connect(
      "127.0.0.1:1", {.connect_timeout = absl::Milliseconds(300), .wait_for_server = true});
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(250));
}

TEST(ClientConnectTest, AServerThatIsSlowToGreetIsWaitedForUntilTheTimeout) {
  // The kernel accepts; nobody speaks HTTP/2.
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string target = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const absl::Time start = absl::Now();
  const auto client = Client::Connect(target, {.connect_timeout = absl::Milliseconds(700)});
  close(listener);
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  EXPECT_THAT(Message(client.status()), HasSubstr("no answer within 700ms"));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(600));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(ClientTest, HealthIsWaitedForUntilItIsServing) {
  server_.SetHealthy("expertd.v1.ExpertService", false);
  std::thread later([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    server_.SetHealthy("expertd.v1.ExpertService", true);
  });
  const absl::Status status =
      WaitUntilHealthy(server_.address(), "expertd.v1.ExpertService", absl::Seconds(20));
  later.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ClientTest, AnUnhealthyServerIsNamedWithItsState) {
  server_.SetHealthy("expertd.v1.ExpertService", false);
  const absl::Status status =
      WaitUntilHealthy(server_.address(), "expertd.v1.ExpertService", absl::ZeroDuration());
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(Message(status), HasSubstr("NOT_SERVING"));
}

TEST_F(ClientTest, AnUnknownHealthServiceIsNotServed) {
  const absl::Status status =
      WaitUntilHealthy(server_.address(), "no.such.Service", absl::ZeroDuration());
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(Message(status), HasSubstr("no.such.Service"));
}

TEST(ClientHealthTest, NobodyThereIsUnavailable) {
  const absl::Status status = WaitUntilHealthy("127.0.0.1:1", "", absl::Milliseconds(300));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(Message(status), HasSubstr("cannot reach 127.0.0.1:1"));
}

}  // namespace
}  // namespace expertd
