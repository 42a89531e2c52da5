#include "server/client.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <random>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "expertd/v1/expertd.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/client_status.h"

namespace expertd {
namespace {

using HealthState = grpc::health::v1::HealthCheckResponse;

constexpr char kPushbackTrailer[] = "grpc-retry-pushback-ms";
constexpr char kPushbackPayload[] = "expertd/retry-pushback-ms";

// Waiting for health: one question's own limit, and the pause between two.
constexpr absl::Duration kHealthAskTimeout = absl::Seconds(2);
constexpr absl::Duration kHealthAskPause = absl::Milliseconds(100);

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, int64_t max_receive_bytes) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(
      static_cast<int>(std::min<int64_t>(max_receive_bytes, std::numeric_limits<int>::max())));
  arguments.SetMaxSendMessageSize(-1);  // the server's cap decides, with its own message
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // Forward is the one place that retries
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, limits::kHttp2FrameBytes);
  // Not the "minimum" back-off: it is also how long an attempt to connect may take.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

void SetTimeout(absl::Duration timeout, grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

absl::Status ToAbsl(const grpc::Status& status, const grpc::ClientContext& context) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  const auto& trailers = context.GetServerTrailingMetadata();
  if (const auto it = trailers.find(kPushbackTrailer); it != trailers.end()) {
    SetRetryPushback(std::string(it->second.data(), it->second.size()), &result);
  }
  return result;
}

absl::Duration JitteredBackoff(int attempt) {
  thread_local std::minstd_rand random(std::random_device{}());
  const int64_t full_ms =
      std::min(limits::kClientBackoffMinMs << std::min(attempt, 16), limits::kClientBackoffMaxMs);
  return absl::Milliseconds(std::uniform_real_distribution<double>(0.5, 1.0)(random) *
                            static_cast<double>(full_ms));
}

// How long to pause before the next attempt; infinite where there must be none.
absl::Duration PauseBefore(const absl::Status& status, int attempt) {
  const std::optional<absl::Duration> pushback = RetryPushback(status);
  if (absl::IsUnavailable(status)) return pushback.value_or(JitteredBackoff(attempt));
  if (absl::IsResourceExhausted(status)) return pushback.value_or(absl::InfiniteDuration());
  return absl::InfiniteDuration();
}

}  // namespace

void SetRetryPushback(const std::string& pushback_ms, absl::Status* status) {
  status->SetPayload(kPushbackPayload, absl::Cord(pushback_ms));
}

std::optional<absl::Duration> RetryPushback(const absl::Status& status) {
  const auto payload = status.GetPayload(kPushbackPayload);
  if (!payload.has_value()) return std::nullopt;
  const std::string text(*payload);
  int64_t pushback_ms = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), pushback_ms);
  const bool readable = error == std::errc() && end == text.data() + text.size();
  return readable && pushback_ms >= 0 ? absl::Milliseconds(pushback_ms) : absl::InfiniteDuration();
}

absl::Status WaitUntilHealthy(const std::string& address, const std::string& service,
                              absl::Duration timeout) {
  const auto stub =
      grpc::health::v1::Health::NewStub(MakeChannel(address, limits::kClientFallbackReceiveBytes));
  const std::string name = service.empty() ? "the process" : service;
  const absl::Time deadline = absl::Now() + timeout;
  std::string last_answer, last_error;
  while (true) {
    grpc::ClientContext context;
    SetTimeout(kHealthAskTimeout, &context);
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    HealthState response;
    const grpc::Status status = stub->Check(&context, request, &response);
    if (status.ok() && response.status() == HealthState::SERVING) return absl::OkStatus();
    if (status.ok()) {
      last_answer = HealthState::ServingStatus_Name(response.status());
    } else if (status.error_code() == grpc::StatusCode::UNAVAILABLE ||
               status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
      last_error = status.error_message();
    } else {
      last_answer = absl::StrCat("not served (", status.error_message(), ")");
    }
    if (absl::Now() + kHealthAskPause > deadline) break;
    absl::SleepFor(kHealthAskPause);
  }
  if (last_answer.empty()) {
    return absl::UnavailableError(absl::StrCat("cannot reach ", address, ": ", last_error));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("health of ", name, " at ", address, " is ", last_answer, ", expected SERVING"));
}

struct Client::Stubs {
  explicit Stubs(std::shared_ptr<grpc::Channel> the_channel)
      : channel(std::move(the_channel)),
        expert(v1::ExpertService::NewStub(channel)),
        model(v1::ModelService::NewStub(channel)) {}

  // One attempt of a unary method; `call` is (context, response) -> grpc::Status.
  template <typename Response, typename Call>
  static absl::StatusOr<Response> Once(absl::Duration timeout, const Call& call) {
    grpc::ClientContext context;
    SetTimeout(timeout, &context);
    Response response;
    const grpc::Status status = call(&context, &response);
    if (!status.ok()) return ToAbsl(status, context);
    return response;
  }

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::ExpertService::Stub> expert;
  std::unique_ptr<v1::ModelService::Stub> model;
};

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& address,
                                                        const ClientOptions& options) {
  Stubs first(MakeChannel(address, limits::kClientFallbackReceiveBytes));
  auto info = Stubs::Once<v1::ServerInfo>(
      options.connect_timeout, [&](grpc::ClientContext* context, v1::ServerInfo* response) {
        context->set_wait_for_ready(options.wait_for_server);
        return first.model->GetServerInfo(context, {}, response);
      });
  if (absl::IsUnavailable(info.status())) {
    return absl::UnavailableError(
        absl::StrCat("cannot reach ", address, ": ", info.status().message()));
  }
  if (absl::IsDeadlineExceeded(info.status())) {
    return absl::UnavailableError(absl::StrCat("cannot reach ", address, ": no answer within ",
                                               absl::FormatDuration(options.connect_timeout)));
  }
  if (!info.ok()) {
    return absl::Status(info.status().code(),
                        absl::StrCat(address, " answers, but not as expertd: GetServerInfo: ",
                                     info.status().message()));
  }
  // The cap is a channel argument, so the rest goes over a second connection that has it.
  const auto cap = static_cast<int64_t>(
      std::min<uint64_t>(info->max_message_bytes(), std::numeric_limits<int>::max()));
  auto stubs = std::make_unique<Stubs>(
      MakeChannel(address, cap > 0 ? cap : limits::kClientFallbackReceiveBytes));
  return std::unique_ptr<Client>(new Client(std::move(stubs), *std::move(info)));
}

Client::Client(std::unique_ptr<Stubs> stubs, v1::ServerInfo info)
    : stubs_(std::move(stubs)), info_(std::move(info)) {}

Client::~Client() = default;

absl::Status Client::Forward(const v1::ForwardRequest& request, const CallOptions& options,
                             v1::ForwardResponse* response) {
  const absl::Time deadline = absl::Now() + options.timeout;
  for (int attempt = 1;; ++attempt) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    absl::Status status = ToAbsl(stubs_->expert->Forward(&context, request, response), context);
    if (status.ok() || attempt >= options.max_attempts) return status;
    const absl::Duration pause = PauseBefore(status, attempt - 1);
    if (pause >= deadline - absl::Now()) return status;
    absl::SleepFor(pause);
  }
}

absl::StatusOr<v1::ServerInfo> Client::GetServerInfo(absl::Duration timeout) {
  return Stubs::Once<v1::ServerInfo>(timeout, [&](auto* context, auto* response) {
    return stubs_->model->GetServerInfo(context, {}, response);
  });
}

absl::StatusOr<v1::ListLayersResponse> Client::ListLayers(absl::Duration timeout) {
  return Stubs::Once<v1::ListLayersResponse>(timeout, [&](auto* context, auto* response) {
    return stubs_->model->ListLayers(context, {}, response);
  });
}

absl::StatusOr<v1::GetPlacementResponse> Client::GetPlacement(absl::Duration timeout) {
  return Stubs::Once<v1::GetPlacementResponse>(timeout, [&](auto* context, auto* response) {
    return stubs_->model->GetPlacement(context, {}, response);
  });
}

absl::StatusOr<v1::LoadProgress> Client::GetLoadProgress(absl::Duration timeout) {
  return Stubs::Once<v1::LoadProgress>(timeout, [&](auto* context, auto* response) {
    return stubs_->model->GetLoadProgress(context, {}, response);
  });
}

absl::StatusOr<v1::SelfTestResponse> Client::SelfTest(const v1::SelfTestRequest& request,
                                                      absl::Duration timeout) {
  return Stubs::Once<v1::SelfTestResponse>(timeout, [&](auto* context, auto* response) {
    return stubs_->expert->SelfTest(context, request, response);
  });
}

std::unique_ptr<ForwardStream> Client::OpenStream(int max_inflight) {
  const int server_limit = info_.max_stream_inflight();
  const int limit = server_limit > 0 ? std::min(max_inflight, server_limit) : max_inflight;
  return std::unique_ptr<ForwardStream>(new ForwardStream(stubs_->channel, std::max(limit, 1)));
}

bool Client::IsReachable(absl::Duration timeout) {
  const absl::Status status = GetServerInfo(timeout).status();
  return !absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status);
}

}  // namespace expertd
