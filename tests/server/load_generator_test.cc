#include "server/load_generator.h"

#include <mutex>
#include <set>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/commands/bench_report.h"
#include "tests/testing/fake_server.h"

namespace expertd {
namespace {

using testing::FakeServer;
using ::testing::HasSubstr;
using testing::SmallLayer;
using testing::ZeroAnswer;

class LoadGeneratorTest : public ::testing::Test {
 protected:
  LoadGeneratorTest() {
    options_.address = server_.address();
    options_.layers = {SmallLayer()};
    options_.tokens = 2;
    options_.concurrency = 3;
    options_.num_requests = 50;
    options_.warmup = absl::ZeroDuration();
    server_.forward = [this](auto*, const v1::ForwardRequest& request,
                             v1::ForwardResponse* response) {
      ++answered_;
      {
        std::lock_guard lock(mutex_);
        layers_seen_.insert(request.layer());
      }
      *response = ZeroAnswer(request);
      return grpc::Status::OK;
    };
    server_.stream = [this](grpc::ServerContext*, FakeServer::Stream* stream) {
      v1::ForwardRequest request;
      while (stream->Read(&request)) {
        ++answered_;
        v1::ForwardStreamResponse item;
        item.set_request_id(request.request_id());
        *item.mutable_result() = ZeroAnswer(request);
        stream->Write(item);
      }
      return grpc::Status::OK;
    };
  }

  LoadReport Run() {
    auto report = RunLoad(options_, &stop_);
    EXPECT_TRUE(report.ok()) << report.status();
    return *std::move(report);
  }

  FakeServer server_;
  LoadOptions options_;
  std::atomic<bool> stop_{false};
  std::atomic<int> answered_{0};
  std::mutex mutex_;
  std::set<int32_t> layers_seen_;
};

TEST_F(LoadGeneratorTest, SendsExactlyTheRequestsAskedForUnary) {
  const LoadReport report = Run();
  EXPECT_EQ(report.latency.count(), 50u);
  EXPECT_EQ(answered_, 50);
  EXPECT_EQ(report.num_errors(), 0u);
  EXPECT_GT(report.elapsed, absl::ZeroDuration());
  EXPECT_FALSE(report.stopped_early);
}

TEST_F(LoadGeneratorTest, SendsExactlyTheRequestsAskedForOnStreams) {
  options_.mode = LoadMode::kStream;
  options_.inflight = 4;
  const LoadReport report = Run();
  EXPECT_EQ(report.latency.count(), 50u);
  EXPECT_EQ(answered_, 50);
  EXPECT_EQ(report.num_errors(), 0u);
}

TEST_F(LoadGeneratorTest, WarmUpIsSentButNotMeasured) {
  options_.warmup = absl::Milliseconds(200);
  options_.num_requests = 5;
  const LoadReport report = Run();
  EXPECT_EQ(report.latency.count(), 5u);
  EXPECT_GT(answered_, 5);
}

TEST_F(LoadGeneratorTest, TheDurationEndsTheRun) {
  options_.num_requests = 0;
  options_.duration = absl::Milliseconds(300);
  const absl::Time start = absl::Now();
  const LoadReport report = Run();
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_GT(report.latency.count(), 0u);
}

TEST_F(LoadGeneratorTest, AStopEndsTheRunWithItsReport) {
  options_.num_requests = 0;
  options_.duration = absl::Hours(1);
  std::thread stopper([this] {
    while (answered_ < 10) absl::SleepFor(absl::Milliseconds(1));
    stop_ = true;
  });
  const LoadReport report = Run();
  stopper.join();
  EXPECT_TRUE(report.stopped_early);
  EXPECT_GE(report.latency.count(), 9u);
}

TEST_F(LoadGeneratorTest, AllLayersAreVisited) {
  v1::LayerInfo second = SmallLayer();
  second.set_layer(4);
  options_.layers.push_back(second);
  options_.concurrency = 1;
  Run();
  EXPECT_EQ(layers_seen_, (std::set<int32_t>{0, 4}));
}

TEST_F(LoadGeneratorTest, ErrorsAreCountedByCodeAndNotRetried) {
  std::atomic<int> calls{0};
  server_.forward = [&calls](auto*, const v1::ForwardRequest& request,
                             v1::ForwardResponse* response) {
    if (++calls % 5 == 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
    *response = ZeroAnswer(request);
    return grpc::Status::OK;
  };
  const LoadReport report = Run();
  EXPECT_EQ(calls, 50);
  EXPECT_EQ(report.latency.count(), 40u);
  EXPECT_EQ(report.errors.at("UNAVAILABLE"), 10u);
  EXPECT_THAT(report.first_error, HasSubstr("draining"));
}

TEST_F(LoadGeneratorTest, StreamErrorItemsAreCountedAndTheStreamGoesOn) {
  std::atomic<int> streams{0}, calls{0};
  server_.stream = [&](grpc::ServerContext*, FakeServer::Stream* stream) {
    ++streams;
    v1::ForwardRequest request;
    while (stream->Read(&request)) {
      v1::ForwardStreamResponse item;
      item.set_request_id(request.request_id());
      if (++calls % 5 == 0) {
        item.mutable_error()->set_code(grpc::StatusCode::RESOURCE_EXHAUSTED);
        item.mutable_error()->set_message("queue full");
      } else {
        *item.mutable_result() = ZeroAnswer(request);
      }
      stream->Write(item);
    }
    return grpc::Status::OK;
  };
  options_.mode = LoadMode::kStream;
  options_.inflight = 2;
  const LoadReport report = Run();
  EXPECT_EQ(streams, 3);
  EXPECT_EQ(report.latency.count(), 40u);
  EXPECT_EQ(report.errors.at("RESOURCE_EXHAUSTED"), 10u);
}

TEST_F(LoadGeneratorTest, ABrokenStreamIsReopenedAndItsRequestsCount) {
  std::atomic<int> streams{0};
  server_.stream = [&](grpc::ServerContext*, FakeServer::Stream* stream) {
    const int number = ++streams;
    v1::ForwardRequest request;
    while (stream->Read(&request)) {
      if (number == 1) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
      v1::ForwardStreamResponse item;
      item.set_request_id(request.request_id());
      *item.mutable_result() = ZeroAnswer(request);
      stream->Write(item);
    }
    return grpc::Status::OK;
  };
  options_.mode = LoadMode::kStream;
  options_.concurrency = 1;
  const LoadReport report = Run();
  EXPECT_EQ(streams, 2);
  EXPECT_EQ(report.errors.at("UNAVAILABLE"), 1u);
  EXPECT_EQ(report.latency.count(), 49u);
}

TEST_F(LoadGeneratorTest, AnAnswerOfTheWrongSizeIsAnError) {
  server_.forward = [](auto*, const v1::ForwardRequest& request, v1::ForwardResponse* response) {
    *response = ZeroAnswer(request);
    response->mutable_output()->pop_back();
    return grpc::Status::OK;
  };
  const LoadReport report = Run();
  EXPECT_EQ(report.latency.count(), 0u);
  EXPECT_EQ(report.errors.at("DATA_LOSS"), 50u);
}

TEST_F(LoadGeneratorTest, TheServersTimingIsAveraged) {
  const LoadReport report = Run();
  EXPECT_EQ(report.server.count, 50u);
  EXPECT_EQ(report.server.kernel_us, 350u);
  const auto json = nlohmann::json::parse(LoadReportJson(options_, server_.info, report));
  EXPECT_EQ(json["server_us"]["kernel"], 7.0);
  EXPECT_EQ(json["step_tokens_mean"], 2.0);
  EXPECT_EQ(json["requests"], 50);
  EXPECT_EQ(json["num_errors"], 0);
  EXPECT_NEAR(json["tokens_per_s"].get<double>(), 2 * json["requests_per_s"].get<double>(), 1e-6);
  EXPECT_LE(json["latency_us"]["p50"], json["latency_us"]["p99"]);
}

TEST_F(LoadGeneratorTest, NobodyToConnectToIsAnError) {
  options_.address = "127.0.0.1:1";
  EXPECT_TRUE(absl::IsUnavailable(RunLoad(options_, &stop_).status()));
}

}  // namespace
}  // namespace expertd
