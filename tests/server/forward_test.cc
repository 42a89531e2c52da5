// Unary Forward, SelfTest and ModelService against the real server in this process.
#include <fcntl.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "grpcpp/create_channel_posix.h"
#include "gtest/gtest.h"
#include "kernels/formats.h"
#include "kernels/reference/reference.h"
#include "tests/testing/golden_vectors.h"
#include "tests/testing/tcp_connection.h"
#include "tests/testing/test_server.h"

namespace expertd {
namespace {

using ::testing::HasSubstr;

std::vector<float> Bf16Values(const std::string& bytes) {
  std::vector<float> values;
  for (size_t i = 0; i < bytes.size(); i += 2) {
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + i, 2);
    values.push_back(Bf16ToFloat(bits));
  }
  return values;
}

class GoldenCases : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenCases, AreAnsweredWithTheSameBitsByOneAndTwoRanks) {
  const testing::GoldenCase golden = testing::LoadGoldenCase(GetParam());
  ServerConfig config = TestServer::Config(1);
  config.checkpoint = golden.checkpoint;
  TestServer one(config);
  config.ranks = config.threads = 2;
  TestServer two(config);
  for (const testing::GoldenRequest& request : golden.requests) {
    SCOPED_TRACE(request.name);
    v1::ForwardResponse first, second;
    ASSERT_TRUE(one.Forward(ToMessage(request, golden.hidden_size), &first).ok());
    ASSERT_TRUE(two.Forward(ToMessage(request, golden.hidden_size), &second).ok());
    EXPECT_EQ(first.output(), second.output());
    EXPECT_EQ(first.num_tokens(), request.num_tokens);
    EXPECT_EQ(first.output_dtype(), v1::DTYPE_BF16);
    const std::vector<float> values = Bf16Values(first.output());
    ASSERT_EQ(values.size(), request.expected.size());
    EXPECT_LE(reference::RelL2(values, request.expected), 2 * request.expected_rel_l2_bf16);
  }
}
INSTANTIATE_TEST_SUITE_P(Forward, GoldenCases, ::testing::ValuesIn(testing::ServedGoldenCases()),
                         [](const auto& name) {
                           std::string text = name.param;
                           std::replace(text.begin(), text.end(), '-', '_');
                           return text;
                         });

TEST(Forward, NumbersInGiveNumbersOutAndF32AnswersAreWithinRoundingOfBf16Ones) {
  TestServer server;
  v1::ForwardResponse numbers, again;
  ASSERT_TRUE(server.Forward(SmallRequest(), &numbers).ok());
  EXPECT_EQ(numbers.request_id(), 77u);
  EXPECT_EQ(numbers.output_values_size(), 2 * 256);
  EXPECT_TRUE(numbers.output().empty());
  EXPECT_EQ(numbers.output_dtype(), v1::DTYPE_F32);
  v1::ForwardRequest bf16 = SmallRequest();
  bf16.set_output_dtype(v1::DTYPE_BF16);
  ASSERT_TRUE(server.Forward(bf16, &again).ok());
  for (int i = 0; i < 2 * 256; ++i) {
    EXPECT_EQ(again.output_values(i), Bf16ToFloat(FloatToBf16(numbers.output_values(i)))) << i;
  }
}

TEST(Forward, TheTimingBlockAddsUp) {
  TestServer server;
  v1::ForwardResponse response;
  ASSERT_TRUE(server.Forward(SmallRequest(5), &response).ok());
  ASSERT_TRUE(server.Forward(SmallRequest(5), &response).ok());
  const v1::Timing& timing = response.timing();
  EXPECT_EQ(timing.step(), 1u);
  EXPECT_EQ(timing.step_tokens(), 5);
  EXPECT_GT(timing.kernel_us(), 0u);
  EXPECT_LE(timing.receive_us() + timing.queue_us() + timing.copy_in_us() + timing.kernel_us() +
                timing.copy_out_us(),
            timing.total_us() + 5);  // five roundings
}

TEST(Forward, ZeroTokensAreAnsweredAtOnce) {
  TestServer server;
  server.gate->HoldSteps();
  v1::ForwardResponse response;
  ASSERT_TRUE(server.Forward(SmallRequest(0), &response).ok());
  EXPECT_EQ(response.num_tokens(), 0);
  EXPECT_TRUE(response.output().empty());
}

TEST(Forward, NanWeightsTouchTheirRowAloneAndMaskedOnesNothing) {
  TestServer server;
  v1::ForwardResponse clean, dirty;
  v1::ForwardRequest request = SmallRequest(3);
  request.set_expert_id_values(0, -1);
  ASSERT_TRUE(server.Forward(request, &clean).ok());
  request.set_routing_weight_values(0, NAN);  // masked
  request.set_routing_weight_values(3, NAN);  // row 1
  ASSERT_TRUE(server.Forward(request, &dirty).ok());
  for (int i = 0; i < 3 * 256; ++i) {
    if (i / 256 == 1) {
      EXPECT_TRUE(std::isnan(dirty.output_values(i))) << i;
    } else {
      EXPECT_EQ(dirty.output_values(i), clean.output_values(i)) << i;
    }
  }
}

TEST(Forward, WrongRequestsAreRefusedAndTheServerLives) {
  TestServer server;
  v1::ForwardResponse response;
  v1::ForwardRequest request = SmallRequest();
  request.set_expert_id_values(3, 8);
  grpc::Status status = server.Forward(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("expert_ids: found 8 at token 1 choice 1"));

  request = SmallRequest();
  request.set_layer(5);
  status = server.Forward(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("0-1"));

  request = SmallRequest();
  request.set_model("nobody");
  EXPECT_EQ(server.Forward(request, &response).error_code(), grpc::StatusCode::NOT_FOUND);

  status = server.Forward(SmallRequest(65), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("got 65 tokens, the buffer is sized for 64"));

  EXPECT_TRUE(server.Forward(SmallRequest(64), &response).ok());
}

TEST(Forward, AMessageOverTheCapIsRefusedByTheTransport) {
  TestServer server;
  grpc::ClientContext context;
  v1::ServerInfo info;
  ASSERT_TRUE(server.models->GetServerInfo(&context, {}, &info).ok());
  v1::ForwardRequest request = SmallRequest();
  request.set_model(std::string(info.max_message_bytes(), 'm'));
  v1::ForwardResponse response;
  EXPECT_EQ(server.Forward(request, &response).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(server.Forward(SmallRequest(), &response).ok());
}

TEST(Forward, ADeadlineThatPassesInTheQueueComputesNothing) {
  TestServer server;
  server.gate->HoldSteps();
  AsyncForward first(server, SmallRequest()), second(server, SmallRequest(2, 1));
  ASSERT_TRUE(server.gate->WaitForEnded(2));
  AsyncForward late(server, SmallRequest(), std::chrono::milliseconds(100));
  EXPECT_EQ(late.Wait().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(TestServer::WaitFor([&] {
    return server.app->metrics().expired_in_queue() + server.app->metrics().cancelled_in_queue() ==
           1;
  }));
  EXPECT_EQ(server.app->engine().num_queued(), 0);
  server.gate->Release();
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(second.Wait().ok());
  EXPECT_EQ(server.app->metrics().steps(), 2u);
}

TEST(Forward, ACancelledRequestLeavesTheQueueAndDisturbsNobody) {
  TestServer server;
  server.gate->HoldSteps();
  AsyncForward first(server, SmallRequest()), second(server, SmallRequest(2, 1));
  ASSERT_TRUE(server.gate->WaitForEnded(2));
  AsyncForward cancelled(server, SmallRequest()), other(server, SmallRequest());
  ASSERT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 2; }));
  cancelled.Cancel();
  EXPECT_EQ(cancelled.Wait().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 1; }));
  EXPECT_EQ(server.app->metrics().cancelled_in_queue(), 1u);
  server.gate->Release();
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(second.Wait().ok());
  EXPECT_TRUE(other.Wait().ok());
  EXPECT_EQ(other.response().timing().step_tokens(), 2);
}

TEST(Forward, AClientWhoseConnectionBreaksFreesItsQueueEntries) {
  TestServer server;
  server.gate->HoldSteps();
  AsyncForward first(server, SmallRequest()), second(server, SmallRequest(2, 1));
  ASSERT_TRUE(server.gate->WaitForEnded(2));
  const int socket = ConnectTcp(server.address);
  auto stub = v1::ExpertService::NewStub(grpc::CreateInsecureChannelFromFd("test", socket));
  grpc::Status status;
  std::thread vanishing([&] {
    grpc::ClientContext context;
    TestServer::Deadline(context);
    v1::ForwardResponse response;
    status = stub->Forward(&context, SmallRequest(), &response);
  });
  ASSERT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 1; }));
  shutdown(socket, SHUT_RDWR);
  EXPECT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 0; }));
  vanishing.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  server.gate->Release();
  EXPECT_TRUE(first.Wait().ok());
}

TEST(Forward, AFullQueueIsAnsweredWithAPushback) {
  ServerConfig config = TestServer::Config(1);
  config.max_queued_requests = 1;
  TestServer server(config);
  server.gate->HoldSteps();
  AsyncForward first(server, SmallRequest());
  ASSERT_TRUE(server.gate->WaitForEnded(1));
  AsyncForward second(server, SmallRequest(2, 1));
  ASSERT_TRUE(server.gate->WaitForEnded(2));
  AsyncForward queued(server, SmallRequest());
  ASSERT_TRUE(TestServer::WaitFor([&] { return server.app->engine().num_queued() == 1; }));
  AsyncForward refused(server, SmallRequest());
  const grpc::Status status = refused.Wait();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("the limit is 1"));
  const auto& trailers = refused.context().GetServerTrailingMetadata();
  const auto pushback = trailers.find("grpc-retry-pushback-ms");
  ASSERT_NE(pushback, trailers.end());
  EXPECT_EQ(std::string(pushback->second.data(), pushback->second.size()), "50");
  server.gate->Release();
  EXPECT_TRUE(queued.Wait().ok());
}

TEST(Forward, AFailedStepIsUnavailableAndTheNextIsServed) {
  TestServer server;
  server.gate->FailNext(absl::InternalError("rank 1 did not answer"));
  v1::ForwardResponse response;
  const grpc::Status status = server.Forward(SmallRequest(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("rank 1 did not answer"));
  EXPECT_TRUE(response.output_values().empty());
  ASSERT_TRUE(
      TestServer::WaitFor([&] { return server.app->state().state() == v1::STATE_SERVING; }));
  EXPECT_TRUE(server.Forward(SmallRequest(), &response).ok());
}

TEST(SelfTest, EveryLayerAgreesWithTheReference) {
  TestServer server;
  for (const int32_t layer : {0, 1}) {
    grpc::ClientContext context;
    TestServer::Deadline(context);
    v1::SelfTestRequest request;
    request.set_layer(layer);
    request.set_num_tokens(8);
    request.set_seed(3);
    v1::SelfTestResponse response;
    ASSERT_TRUE(server.experts->SelfTest(&context, request, &response).ok());
    EXPECT_TRUE(response.passed());
    EXPECT_GT(response.rel_l2_error(), 0);
    EXPECT_LT(response.rel_l2_error(), response.tolerance());
    EXPECT_EQ(response.num_tokens(), 8);
  }
}

TEST(SelfTest, WrongArgumentsAreRefused) {
  TestServer server;
  v1::SelfTestResponse response;
  v1::SelfTestRequest request;
  request.set_layer(9);
  grpc::ClientContext first, second;
  EXPECT_EQ(server.experts->SelfTest(&first, request, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
  request.set_layer(0);
  request.set_num_tokens(9);
  EXPECT_EQ(server.experts->SelfTest(&second, request, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST(SelfTest, OneRunsAtATime) {
  TestServer server;
  server.gate->HoldSteps();
  grpc::Status status;
  std::thread running([&] {
    grpc::ClientContext context;
    TestServer::Deadline(context);
    v1::SelfTestResponse response;
    status = server.experts->SelfTest(&context, {}, &response);
  });
  ASSERT_TRUE(server.gate->WaitForEnded(1));
  grpc::ClientContext context;
  v1::SelfTestResponse response;
  EXPECT_EQ(server.experts->SelfTest(&context, {}, &response).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  server.gate->Release();
  running.join();
  EXPECT_TRUE(status.ok());
}

TEST(ModelService, DescribesWhatIsServed) {
  TestServer server;
  grpc::ClientContext a, b, c;
  v1::ServerInfo info;
  ASSERT_TRUE(server.models->GetServerInfo(&a, {}, &info).ok());
  EXPECT_EQ(info.model(), "v4");
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_EQ(info.num_ranks(), 2);
  EXPECT_EQ(info.max_tokens(), 64);
  EXPECT_EQ(info.state(), v1::STATE_SERVING);
  EXPECT_GT(info.weight_bytes(), 0u);
  EXPECT_EQ(info.devices_size(), 2);

  v1::ListLayersResponse layers;
  ASSERT_TRUE(server.models->ListLayers(&b, {}, &layers).ok());
  ASSERT_EQ(layers.layers_size(), 2);
  EXPECT_EQ(layers.layers(1).layer(), 1);
  EXPECT_EQ(layers.layers(1).num_experts(), 8);
  EXPECT_EQ(layers.layers(1).swiglu_limit(), 10);

  v1::GetPlacementResponse placement;
  ASSERT_TRUE(server.models->GetPlacement(&c, {}, &placement).ok());
  EXPECT_EQ(placement.num_ranks(), 2);
  ASSERT_EQ(placement.expert_of_slot_size(), 8);
  EXPECT_EQ(placement.expert_of_slot(5), 5);
}

}  // namespace
}  // namespace expertd
