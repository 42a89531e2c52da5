// Start, health, drain and failure of the real server in this process.
#include "server/app.h"

#include <gmock/gmock.h>

#include "absl/time/clock.h"
#include "config/exit_codes.h"
#include "gtest/gtest.h"
#include "kernels/fatal.h"
#include "tests/testing/test_server.h"

namespace expertd {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using ::testing::HasSubstr;

constexpr char kExperts[] = "expertd.v1.ExpertService";

grpc::Status Check(const TestServer& server, const std::string& name,
                   HealthCheckResponse* response) {
  grpc::ClientContext context;
  TestServer::Deadline(context);
  HealthCheckRequest request;
  request.set_service(name);
  return server.health->Check(&context, request, response);
}

HealthCheckResponse::ServingStatus HealthOf(const TestServer& server, const std::string& name) {
  HealthCheckResponse response;
  EXPECT_TRUE(Check(server, name, &response).ok());
  return response.status();
}

class Watch {
 public:
  Watch(const TestServer& server, const std::string& name) {
    TestServer::Deadline(context_);
    request_.set_service(name);
    reader_ = server.health->Watch(&context_, request_);
  }
  HealthCheckResponse::ServingStatus Next() {
    HealthCheckResponse response;
    EXPECT_TRUE(reader_->Read(&response));
    return response.status();
  }
  bool AtEnd() {
    HealthCheckResponse response;
    return !reader_->Read(&response);
  }
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  HealthCheckRequest request_;
  std::unique_ptr<grpc::ClientReader<HealthCheckResponse>> reader_;
};

TEST(App, WhileLoadingItSaysSoAndReportsProgress) {
  TestServer server(TestServer::Config(2), false);
  server.gate->HoldLoading();
  server.app->StartLoading();
  v1::ForwardResponse response;
  const grpc::Status status = server.Forward(SmallRequest(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("loading: 0 %"));
  EXPECT_EQ(HealthOf(server, ""), HealthCheckResponse::SERVING);
  EXPECT_EQ(HealthOf(server, kExperts), HealthCheckResponse::NOT_SERVING);
  grpc::ClientContext during, after;
  v1::LoadProgress progress;
  ASSERT_TRUE(server.models->GetLoadProgress(&during, {}, &progress).ok());
  EXPECT_EQ(progress.state(), v1::STATE_LOADING);

  server.gate->Release();
  ASSERT_TRUE(server.app->WaitUntilServing(absl::Now() + absl::Seconds(20)).ok());
  EXPECT_EQ(HealthOf(server, kExperts), HealthCheckResponse::SERVING);
  ASSERT_TRUE(server.models->GetLoadProgress(&after, {}, &progress).ok());
  EXPECT_EQ(progress.state(), v1::STATE_SERVING);
  EXPECT_GT(progress.bytes_total(), 0u);
  EXPECT_EQ(progress.bytes_done(), progress.bytes_total());
  EXPECT_TRUE(server.Forward(SmallRequest(), &response).ok());
}

TEST(App, HealthWatchFollowsLoadingFaultsAndDraining) {
  TestServer server(TestServer::Config(2), false);
  Watch watch(server, kExperts), process(server, "");
  EXPECT_EQ(watch.Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(process.Next(), HealthCheckResponse::SERVING);
  server.app->StartLoading();
  EXPECT_EQ(watch.Next(), HealthCheckResponse::SERVING);
  server.app->Shutdown(absl::Now() + absl::Seconds(20));
  EXPECT_EQ(watch.Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_TRUE(watch.AtEnd());
  EXPECT_EQ(process.Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_TRUE(process.AtEnd());
}

TEST(App, AnUnknownServiceIsNotFoundByCheckAndUnknownToWatch) {
  TestServer server;
  HealthCheckResponse response;
  EXPECT_EQ(Check(server, "nobody", &response).error_code(), grpc::StatusCode::NOT_FOUND);
  Watch watch(server, "nobody");
  EXPECT_EQ(watch.Next(), HealthCheckResponse::SERVICE_UNKNOWN);
  watch.Cancel();
  EXPECT_TRUE(watch.AtEnd());
}

TEST(App, DrainingRefusesNewRequestsAndFinishesRunningOnes) {
  TestServer server;
  server.gate->HoldSteps();
  AsyncForward running(server, SmallRequest()), second(server, SmallRequest(2, 1));
  ASSERT_TRUE(server.gate->WaitForEnded(2));
  AsyncForward queued(server, SmallRequest());
  ASSERT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 1; }));
  std::thread shutdown([&] { server.app->Shutdown(absl::Now() + absl::Seconds(20)); });
  ASSERT_TRUE(TestServer::WaitFor([&] { return !server.app->state().Ready().ok(); }));
  v1::ForwardResponse response;
  const grpc::Status refused = server.Forward(SmallRequest(), &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("draining"));
  EXPECT_EQ(HealthOf(server, kExperts), HealthCheckResponse::NOT_SERVING);
  server.gate->Release();
  EXPECT_TRUE(running.Wait().ok());
  EXPECT_TRUE(second.Wait().ok());
  EXPECT_TRUE(queued.Wait().ok());
  shutdown.join();
  EXPECT_TRUE(server.app->WaitUntilOver().ok());
}

TEST(App, WithinTheGraceTimeRequestsAreStillServed) {
  ServerConfig config = TestServer::Config(2);
  config.drain_grace_ms = 2000;
  TestServer server(config);
  Watch watch(server, kExperts);
  EXPECT_EQ(watch.Next(), HealthCheckResponse::SERVING);
  std::thread shutdown([&] { server.app->Shutdown(absl::Now() + absl::Seconds(20)); });
  EXPECT_EQ(watch.Next(), HealthCheckResponse::NOT_SERVING);
  v1::ForwardResponse response;
  EXPECT_TRUE(server.Forward(SmallRequest(), &response).ok());
  shutdown.join();
}

TEST(App, TheDrainDeadlineCancelsWhatIsLeft) {
  TestServer server;
  server.gate->HoldSteps();
  AsyncForward running(server, SmallRequest()), second(server, SmallRequest(2, 1));
  ASSERT_TRUE(server.gate->WaitForEnded(2));
  AsyncForward queued(server, SmallRequest());
  ASSERT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 1; }));
  server.app->Shutdown(absl::Now() + absl::Milliseconds(100));
  const grpc::Status status = queued.Wait();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("drain deadline"));
}

TEST(App, ShutdownWhileLoadingIsPrompt) {
  TestServer server(TestServer::Config(2), false);
  server.gate->HoldLoading();
  server.app->StartLoading();
  std::thread shutdown([&] { server.app->Shutdown(absl::Now() + absl::Seconds(20)); });
  ASSERT_TRUE(TestServer::WaitFor([&] { return !server.app->state().Ready().ok(); }));
  server.gate->Release();
  shutdown.join();
  EXPECT_TRUE(server.app->WaitUntilOver().ok());
}

TEST(App, ADrainThatBeganBeforeLoadingLoadsNothing) {
  TestServer server(TestServer::Config(2), false);
  server.gate->HoldLoading();  // a load would never end
  server.app->BeginDrain();
  server.app->StartLoading();
  EXPECT_TRUE(server.app->WaitUntilOver().ok());
  server.app->Shutdown(absl::Now() + absl::Seconds(20));
}

TEST(App, ADirectoryThatIsNoCheckpointIsRefused) {
  ServerConfig config = TestServer::Config(2);
  config.checkpoint = "/nonexistent";
  const auto app = App::Open(config, BackendFor(config.backend));
  ASSERT_FALSE(app.ok());
  EXPECT_THAT(std::string(app.status().message()), HasSubstr("/nonexistent"));
}

TEST(App, AnAddressInUseIsRefusedWithTheReason) {
  TestServer server;
  ServerConfig config = TestServer::Config(1);
  config.listen = server.address;
  auto second = App::Open(config, BackendFor(config.backend));
  ASSERT_TRUE(second.ok());
  const auto bound = (*second)->Listen();
  ASSERT_FALSE(bound.ok());
  EXPECT_THAT(std::string(bound.status().message()),
              HasSubstr(server.address + ": Address already in use"));
}

TEST(App, AHostThatIsNotLocalIsRefusedWithTheReason) {
  ServerConfig config = TestServer::Config(1);
  config.listen = "192.0.2.1:0";
  auto app = App::Open(config, BackendFor(config.backend));
  ASSERT_TRUE(app.ok());
  const auto bound = (*app)->Listen();
  ASSERT_FALSE(bound.ok());
  EXPECT_THAT(std::string(bound.status().message()), HasSubstr("192.0.2.1:0"));
}

TEST(App, AUnixSocketServes) {
  ServerConfig config = TestServer::Config(1);
  config.listen = "unix:" + ::testing::TempDir() + "expertd_app_test.sock";
  TestServer server(config);
  EXPECT_EQ(server.address, config.listen);
  v1::ForwardResponse response;
  EXPECT_TRUE(server.Forward(SmallRequest(), &response).ok());
}

TEST(App, AFailedLoadEndsTheProcessWithItsReason) {
  ServerConfig config = TestServer::Config(2);
  auto app =
      App::Open(config, [](const BackendOptions&) -> absl::StatusOr<std::unique_ptr<Backend>> {
        return absl::ResourceExhaustedError("needs 9 GB, has 1 GB");
      });
  ASSERT_TRUE(app.ok());
  ASSERT_TRUE((*app)->Listen().ok());
  (*app)->StartLoading();
  const absl::Status over = (*app)->WaitUntilOver();
  EXPECT_THAT(std::string(over.message()), HasSubstr("needs 9 GB"));
  EXPECT_EQ(App::ExitCode(over), exit_codes::kOsError);
  EXPECT_FALSE((*app)->WaitUntilServing(absl::Now() + absl::Seconds(1)).ok());
}

TEST(App, AFatalFaultEndsTheProcess) {
  TestServer server;
  server.gate->FailNext(MarkFatal(absl::InternalError("the device is gone")));
  v1::ForwardResponse response;
  EXPECT_EQ(server.Forward(SmallRequest(), &response).error_code(), grpc::StatusCode::UNAVAILABLE);
  const absl::Status over = server.app->WaitUntilOver();
  EXPECT_THAT(std::string(over.message()), HasSubstr("the device is gone"));
  EXPECT_EQ(App::ExitCode(over), exit_codes::kSoftware);
  EXPECT_EQ(HealthOf(server, kExperts), HealthCheckResponse::NOT_SERVING);
  const grpc::Status later = server.Forward(SmallRequest(), &response);
  EXPECT_EQ(later.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(later.error_message(), HasSubstr("the device is gone"));
}

TEST(App, ExitCodesTellTheKindsOfFailureApart) {
  EXPECT_EQ(App::ExitCode(absl::OkStatus()), exit_codes::kOk);
  EXPECT_EQ(App::ExitCode(absl::DataLossError("changed")), exit_codes::kDataError);
  EXPECT_EQ(App::ExitCode(absl::DeadlineExceededError("slow")), exit_codes::kTempFail);
  EXPECT_EQ(App::ExitCode(absl::FailedPreconditionError("no CUDA")), exit_codes::kUsage);
  EXPECT_EQ(App::ExitCode(MarkFatal(absl::InternalError("gone"))), exit_codes::kSoftware);
}

TEST(App, AnUnusedOneGoesAway) {
  const ServerConfig config = TestServer::Config(1);
  EXPECT_TRUE(App::Open(config, BackendFor(config.backend)).ok());
}

}  // namespace
}  // namespace expertd
