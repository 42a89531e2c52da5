#include "server/load_generator.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/client.h"
#include "server/random_request.h"

namespace expertd {
namespace {

constexpr size_t kRoutingVariants =
    8;  // a worker's id tables, so that not always the same experts work
constexpr absl::Duration kErrorPause = absl::Milliseconds(10);  // without advice from the server
constexpr absl::Duration kMaxErrorPause = absl::Seconds(1);

struct Ticket {
  bool measured = false;
  absl::Time sent;
};

// What the workers share: when to measure, and who may send another request.
class Schedule {
 public:
  Schedule(const LoadOptions& options, const std::atomic<bool>* stop)
      : by_count_(options.num_requests > 0),
        left_(options.num_requests),
        stop_(stop),
        measure_from_(absl::Now() + options.warmup),
        end_(by_count_ ? absl::InfiniteFuture() : measure_from_ + options.duration) {}

  // The right to send one request now; nothing = the run is over.
  std::optional<Ticket> Next() {
    const absl::Time now = absl::Now();
    if (stopped() || now >= end_) return std::nullopt;
    if (now < measure_from_) return Ticket{false, now};
    if (by_count_ && left_.fetch_sub(1, std::memory_order_relaxed) <= 0) return std::nullopt;
    return Ticket{true, now};
  }

  bool stopped() const { return stop_->load(std::memory_order_relaxed); }
  absl::Time measure_from() const { return measure_from_; }

  // After a failure: what the server advised, in slices so that a stop is seen.
  void Pause(const absl::Status& status) const {
    const absl::Time until =
        absl::Now() + std::min(RetryPushback(status).value_or(kErrorPause), kMaxErrorPause);
    while (!stopped() && absl::Now() < until) {
      absl::SleepFor(std::min(until - absl::Now(), kErrorPause));
    }
  }

 private:
  const bool by_count_;
  std::atomic<int64_t> left_;
  const std::atomic<bool>* const stop_;
  const absl::Time measure_from_;
  const absl::Time end_;
};

// One worker: its connection, its request, its figures. Runs on its own thread.
class Worker {
 public:
  Worker(const LoadOptions& options, int index, std::unique_ptr<Client> client)
      : options_(options),
        client_(std::move(client)),
        next_layer_(static_cast<size_t>(index) % options.layers.size()) {
    RandomRequestOptions random_options;
    random_options.tokens = options.tokens;
    random_options.top_k = options.top_k;
    random_options.dtype = options.dtype;
    random_options.seed = options.seed + static_cast<uint64_t>(index);
    request_ = MakeRandomRequest(options.layers.front(), random_options);
    std::mt19937_64 random(random_options.seed + 1);
    v1::ForwardRequest routing = request_;
    for (size_t i = 0; i < kRoutingVariants; ++i) {
      FillRandomRouting(options.layers.front().num_experts(), random, &routing);
      ids_.push_back(routing.expert_ids());
      weights_.push_back(routing.routing_weights());
    }
  }

  void Run(Schedule* schedule) {
    options_.mode == LoadMode::kUnary ? RunUnary(schedule) : RunStream(schedule);
    report_.elapsed = std::max(last_answer_ - schedule->measure_from(), absl::ZeroDuration());
  }

  const LoadReport& report() const { return report_; }

 private:
  using Inflight = std::unordered_map<uint64_t, Ticket>;

  const v1::ForwardRequest& NextRequest() {
    const size_t variant = next_id_ % kRoutingVariants;
    request_.set_request_id(++next_id_);
    request_.set_layer(options_.layers[next_layer_].layer());
    request_.set_expert_ids(ids_[variant]);
    request_.set_routing_weights(weights_[variant]);
    next_layer_ = (next_layer_ + 1) % options_.layers.size();
    return request_;
  }

  void RunUnary(Schedule* schedule) {
    v1::ForwardResponse response;
    const CallOptions call{options_.timeout, /*max_attempts=*/1};
    while (true) {
      const v1::ForwardRequest& request = NextRequest();
      const std::optional<Ticket> ticket = schedule->Next();
      if (!ticket) return;
      absl::Status status = client_->Forward(request, call, &response);
      const absl::Time answered = absl::Now();
      if (status.ok()) status = CheckAnswer(response);
      Record(*ticket, answered, status, response.timing());
      if (!status.ok()) schedule->Pause(status);
    }
  }

  void RunStream(Schedule* schedule) {
    bool more = true;
    while (more) {
      const std::unique_ptr<ForwardStream> stream = client_->OpenStream(options_.inflight);
      Inflight inflight;
      const absl::Status broken = RunOneStream(schedule, stream.get(), &inflight, &more);
      if (broken.ok()) continue;
      for (const auto& [id, ticket] : inflight) Record(ticket, absl::Now(), broken, {});
      if (more) schedule->Pause(broken);
    }
  }

  // Until the run is over (`*more` = false) or the stream breaks.
  absl::Status RunOneStream(Schedule* schedule, ForwardStream* stream, Inflight* inflight,
                            bool* more) {
    request_.set_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.timeout)));
    const auto limit = static_cast<size_t>(stream->max_inflight());
    while (true) {
      while (*more && inflight->size() < limit) {
        v1::ForwardRequest request = NextRequest();
        const std::optional<Ticket> ticket = schedule->Next();
        if (!ticket) {
          *more = false;
          stream->CloseSend();
          break;
        }
        inflight->emplace(request.request_id(), *ticket);
        const absl::Status sent = stream->Send(std::move(request), options_.timeout);
        if (!sent.ok()) return sent;
      }
      // The server ends a request at its timeout_ms; a second more tells a dead stream from a slow
      // one.
      auto received = stream->Receive(options_.timeout + absl::Seconds(1));
      if (!received.ok()) return received.status();
      if (!received->has_value()) return absl::OkStatus();
      ForwardStream::Answer& answer = **received;
      if (answer.status.ok()) answer.status = CheckAnswer(answer.response);
      const auto ticket = inflight->find(answer.request_id);
      Record(ticket->second, absl::Now(), answer.status, answer.response.timing());
      inflight->erase(ticket);
      if (!answer.status.ok()) schedule->Pause(answer.status);
    }
  }

  absl::Status CheckAnswer(const v1::ForwardResponse& response) const {
    const size_t expected = request_.hidden_states().size();  // [T, H] of the same dtype
    if (response.output().size() == expected) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("output has ", response.output().size(), " bytes, expected ", expected));
  }

  void Record(const Ticket& ticket, absl::Time answered, const absl::Status& status,
              const v1::Timing& timing) {
    if (!ticket.measured) return;
    last_answer_ = std::max(last_answer_, answered);
    if (status.ok()) {
      const absl::Duration latency = std::max(answered - ticket.sent, absl::ZeroDuration());
      report_.latency.Add(static_cast<uint64_t>(absl::ToInt64Microseconds(latency)));
      report_.server.Add(timing);
      return;
    }
    ++report_.errors[absl::StatusCodeToString(status.code())];
    if (report_.first_error.empty())
      report_.first_error = status.ToString(absl::StatusToStringMode::kWithNoExtraData);
  }

  const LoadOptions& options_;
  const std::unique_ptr<Client> client_;
  v1::ForwardRequest request_;
  std::vector<std::string> ids_, weights_;  // [kRoutingVariants] tensors of [T, K]
  uint64_t next_id_ = 0;
  size_t next_layer_;
  LoadReport report_;
  absl::Time last_answer_ = absl::InfinitePast();
};

}  // namespace

void TimingSums::Add(const v1::Timing& timing) {
  ++count;
  receive_us += timing.receive_us();
  queue_us += timing.queue_us();
  copy_in_us += timing.copy_in_us();
  kernel_us += timing.kernel_us();
  copy_out_us += timing.copy_out_us();
  total_us += timing.total_us();
  step_tokens += static_cast<uint64_t>(std::max(timing.step_tokens(), 0));
}

void TimingSums::Merge(const TimingSums& other) {
  count += other.count;
  receive_us += other.receive_us;
  queue_us += other.queue_us;
  copy_in_us += other.copy_in_us;
  kernel_us += other.kernel_us;
  copy_out_us += other.copy_out_us;
  total_us += other.total_us;
  step_tokens += other.step_tokens;
}

uint64_t LoadReport::num_errors() const {
  uint64_t sum = 0;
  for (const auto& [code, count] : errors) sum += count;
  return sum;
}

void LoadReport::Merge(const LoadReport& other) {
  latency.Merge(other.latency);
  for (const auto& [code, count] : other.errors) errors[code] += count;
  if (first_error.empty()) first_error = other.first_error;
  server.Merge(other.server);
  elapsed = std::max(elapsed, other.elapsed);
}

absl::StatusOr<LoadReport> RunLoad(const LoadOptions& options, const std::atomic<bool>* stop) {
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < options.concurrency; ++i) {
    auto client = Client::Connect(options.address);
    if (!client.ok()) return client.status();
    workers.push_back(std::make_unique<Worker>(options, i, *std::move(client)));
  }
  Schedule schedule(options, stop);
  std::vector<std::thread> threads;
  for (const auto& worker : workers) {
    threads.emplace_back([&schedule, w = worker.get()] { w->Run(&schedule); });
  }
  for (std::thread& thread : threads) thread.join();
  LoadReport report;
  for (const auto& worker : workers) report.Merge(worker->report());
  report.stopped_early = schedule.stopped();
  return report;
}

}  // namespace expertd
