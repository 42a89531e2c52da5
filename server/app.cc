#include "server/app.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "config/exit_codes.h"
#include "config/limits.h"
#include "config/version.h"
#include "kernels/fatal.h"
#include "loader/load_plan.h"
#include "loader/progress.h"
#include "loader/weight_loader.h"
#include "server/listener.h"
#include "spdlog/spdlog.h"

namespace expertd {
namespace {

constexpr char kExpertService[] = "expertd.v1.ExpertService";

HealthService::Status ToHealth(bool serving) {
  return serving ? grpc::health::v1::HealthCheckResponse::SERVING
                 : grpc::health::v1::HealthCheckResponse::NOT_SERVING;
}

absl::StatusOr<Placement> Place(const ServerConfig& config, int32_t num_experts) {
  const int32_t ranks = std::max(1, config.ranks);
  if (config.redundant_slots == 0) return Placement::Contiguous(num_experts, ranks);
  const int32_t own = (num_experts + ranks - 1) / ranks;
  return Placement::Redundant(num_experts, ranks, own + config.redundant_slots);
}

Engine::Options ToEngineOptions(const ServerConfig& config) {
  Engine::Options options;
  options.queue = {config.max_queued_requests, config.max_inflight_bytes};
  options.batch_wait = absl::Microseconds(config.batch_wait_us);
  options.step_timeout = absl::Milliseconds(config.step_timeout_ms);
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<App>> App::Open(const ServerConfig& config,
                                               BackendFactory make_backend) {
  CheckpointOptions options;
  options.allow_symlinks = config.allow_symlinks;
  options.first_layer = config.first_layer;
  options.last_layer = config.last_layer;
  absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(config.checkpoint, options);
  if (!checkpoint.ok()) return checkpoint.status();
  absl::StatusOr<Placement> placement = Place(config, checkpoint->layers().front().num_experts);
  if (!placement.ok()) return placement.status();
  const int64_t hidden_size = checkpoint->layers().front().hidden_size;
  if (MaxRequestTokens(1, hidden_size, config.max_inflight_bytes) < 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("max-inflight-bytes: found ", config.max_inflight_bytes,
                     ", expected enough for one row of hidden size ", hidden_size));
  }
  return std::unique_ptr<App>(new App(config, std::move(make_backend), *std::move(checkpoint),
                                      std::make_shared<const Placement>(*std::move(placement))));
}

App::App(const ServerConfig& config, BackendFactory make_backend, Checkpoint checkpoint,
         std::shared_ptr<const Placement> placement)
    : config_(config),
      make_backend_(std::move(make_backend)),
      checkpoint_(std::move(checkpoint)),
      placement_(std::move(placement)),
      health_({"", kExpertService}),
      state_([this](bool serving) { health_.Set(kExpertService, ToHealth(serving)); }) {
  model_.name = config_.model_name.empty() ? checkpoint_.model_name() : config_.model_name;
  model_.layers = checkpoint_.layers();
  model_.max_tokens =
      MaxRequestTokens(int64_t{placement_->num_ranks()} * config_.max_tokens_per_rank,
                       model_.layers.front().hidden_size, config_.max_inflight_bytes);
  health_.Set("", ToHealth(true));
  engine_ = std::make_unique<Engine>(ToEngineOptions(config_), &metrics_,
                                     [this](const absl::Status& status) {
                                       if (status.ok()) {
                                         state_.Serve();
                                       } else {
                                         state_.Fail(status, IsFatal(status));
                                       }
                                     });
  self_tester_ = std::make_unique<SelfTester>(&checkpoint_, &model_, engine_.get());
  ServiceContext context;
  context.model = &model_;
  context.state = &state_;
  context.engine = engine_.get();
  context.metrics = &metrics_;
  context.self_tester = self_tester_.get();
  context.max_stream_inflight = config_.max_stream_inflight;
  expert_service_ = std::make_unique<ExpertServiceImpl>(context);
  model_service_ =
      std::make_unique<ModelServiceImpl>(&model_, placement_.get(), &state_, MakeInfo());
}

v1::ServerInfo App::MakeInfo() const {
  v1::ServerInfo info;
  info.set_version(std::string(Version()));
  info.set_commit(std::string(Commit()));
  info.set_model(model_.name);
  info.set_backend(config_.backend == BackendKind::kCuda ? "cuda" : "cpu");
  info.set_num_ranks(placement_->num_ranks());
  info.set_max_tokens(model_.max_tokens);
  info.set_max_tokens_per_rank(config_.max_tokens_per_rank);
  info.set_max_top_k(limits::kMaxTopK);
  info.set_max_message_bytes(MaxMessageBytes(model_));
  info.set_max_stream_inflight(config_.max_stream_inflight);
  info.set_self_test_max_tokens(limits::kSelfTestMaxTokens);
  info.set_max_inflight_bytes(config_.max_inflight_bytes);
  info.set_max_queued_requests(config_.max_queued_requests);
  return info;
}

int64_t App::MaxReceivedBytes() const {
  // Several of the largest messages, however small the budget of decoded ones is.
  return std::max(config_.max_inflight_bytes, 4 * MaxMessageBytes(model_)) +
         limits::kTransportBytes;
}

absl::StatusOr<std::string> App::Listen() {
  absl::StatusOr<Listening> listening =
      expertd::Listen(config_.listen, MaxMessageBytes(model_), MaxReceivedBytes(),
                      {expert_service_.get(), model_service_.get(), &health_});
  if (!listening.ok()) return listening.status();
  server_ = std::move(listening->server);
  return listening->address;
}

void App::StartLoading() {
  if (state_.state() == v1::STATE_DRAINING) return;  // a signal came first
  loader_ = std::thread([this] {
    const absl::Status status = Load();
    if (status.ok()) return;
    spdlog::log(stop_loading_ ? spdlog::level::info : spdlog::level::err, "loading failed: {}",
                std::string(status.message()));
    state_.Fail(status, true);
  });
}

absl::Status App::Load() {
  const absl::Time start = absl::Now();
  BackendOptions options;
  options.layers = model_.layers;
  options.placement = placement_;
  options.max_tokens_per_rank = config_.max_tokens_per_rank;
  options.num_threads = config_.threads;
  options.devices = config_.devices;
  options.partials = config_.partials;
  // Less than the engine's: a step that the backend gives up leaves the process usable.
  options.step_timeout = absl::Milliseconds(config_.step_timeout_ms) * 3 / 4;
  absl::StatusOr<std::unique_ptr<Backend>> backend = make_backend_(options);
  if (!backend.ok()) return backend.status();

  const LoadPlan plan = MakeLoadPlan(checkpoint_, *placement_, 0, placement_->num_ranks());
  state_.SetProgress(0, plan.total_bytes);
  LoadOptions load;
  load.num_threads = config_.load_threads;
  load.deadline = start + absl::Seconds(config_.load_timeout_s);
  load.cancelled = &stop_loading_;
  ProgressPrinter printer(stderr, ProgressPrinter::IsTerminal(stderr));
  load.on_progress = [this, &printer](const LoadProgress& progress) {
    state_.SetProgress(progress.bytes_done, progress.bytes_total);
    printer.Update(progress);
  };
  const absl::Status loaded = LoadWeights(checkpoint_, plan, (*backend)->sink(), load);
  if (!loaded.ok()) return loaded;
  state_.SetProgress(plan.total_bytes, plan.total_bytes);

  const BackendInfo& info = (*backend)->info();
  model_service_->SetBackend(info.detail, info.devices, info.weight_bytes, info.workspace_bytes);
  spdlog::info("loaded {} bytes in {:.2f} s; {} ranks on {} ({}), workspace {} bytes",
               plan.total_bytes, absl::ToDoubleSeconds(absl::Now() - start), info.num_ranks,
               info.name, info.detail, info.workspace_bytes);
  engine_->Start(*std::move(backend));
  return absl::OkStatus();
}

absl::Status App::WaitUntilServing(absl::Time deadline) const {
  return state_.WaitUntilLoaded(deadline);
}

absl::Status App::WaitUntilOver() const { return state_.WaitUntilOver(); }

int App::ExitCode(const absl::Status& over) {
  if (over.ok()) return exit_codes::kOk;
  if (IsFatal(over)) return exit_codes::kSoftware;
  switch (over.code()) {
    case absl::StatusCode::kResourceExhausted:  // memory
      return exit_codes::kOsError;
    case absl::StatusCode::kDeadlineExceeded:  // loading took too long
      return exit_codes::kTempFail;
    case absl::StatusCode::kFailedPrecondition:  // a backend that this build or machine lacks
    case absl::StatusCode::kUnimplemented:       // or that cannot do what was asked
      return exit_codes::kUsage;
    default:
      return exit_codes::kDataError;
  }
}

void App::Shutdown(absl::Time deadline) {
  std::call_once(shut_down_, [this, deadline] {
    state_.Drain();
    stop_loading_ = true;
    const absl::Duration grace = absl::Milliseconds(config_.drain_grace_ms);
    absl::SleepFor(std::min(grace, std::max(absl::ZeroDuration(), deadline - absl::Now())));
    state_.Refuse();
    if (loader_.joinable()) loader_.join();
    expert_service_->DrainStreams();
    const absl::Status reason = absl::UnavailableError("draining: the drain deadline passed");
    if (!engine_->Drain(deadline)) {
      spdlog::warn("the drain deadline passed, cancelling what is left");
      engine_->Stop(reason);
    }
    health_.Shutdown();
    if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(deadline));
    engine_->Stop(reason);
    spdlog::info("{}", metrics_.Summary());
  });
}

App::~App() { Shutdown(absl::Now()); }

}  // namespace expertd
