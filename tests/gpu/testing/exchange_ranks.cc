#include "tests/gpu/testing/exchange_ranks.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/nccl_transport.h"
#include "tests/gpu/testing/local_transport.h"

namespace expertd::testing {
namespace {

std::vector<int32_t> ExpertsOf(const Placement& placement, int rank) {
  std::vector<int32_t> experts(placement.slots_per_rank());
  for (int32_t slot = 0; slot < placement.slots_per_rank(); ++slot) {
    experts[slot] = placement.ExpertAt(rank, slot);
  }
  return experts;
}

cuda::ExchangeShape ShapeOf(const LayerSpec& spec, const Placement& placement,
                            const ExchangeRanksOptions& options) {
  return {.num_ranks = placement.num_ranks(),
          .max_tokens_per_rank = options.max_tokens,
          .max_top_k = options.max_top_k,
          .slots_per_rank = placement.slots_per_rank(),
          .hidden_size = spec.hidden_size,
          .intermediate_size = spec.intermediate_size,
          .partials_bf16 = options.partials_bf16};
}

absl::Status FirstError(const std::vector<absl::Status>& statuses) {
  absl::Status first;
  for (const absl::Status& status : statuses) first.Update(status);
  return first;
}

}  // namespace

ExchangeRank::ExchangeRank(const HostLayer& layer, const Placement& placement, int rank,
                           const ExchangeRanksOptions& options)
    : spec_(layer.spec),
      shape_(ShapeOf(layer.spec, placement, options)),
      limit_(options.limit),
      packed_(layer, ExpertsOf(placement, rank)),
      placement_(placement) {
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
}

ExchangeRank::~ExchangeRank() {
  exchange_.reset();
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

absl::Status ExchangeRank::Open(cuda::Communicator* group,
                                std::unique_ptr<cuda::RowTransport> transport) {
  cuda::HostExchangeOptions options = {
      .shape = shape_, .placement = placement_.view(), .limit = limit_, .group = group};
  int device = 0;
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  EXPERTD_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&options.num_sms, cudaDevAttrMultiProcessorCount, device));
  auto made = transport == nullptr ? cuda::HostExchange::Create(options)
                                   : cuda::HostExchange::Create(options, std::move(transport));
  if (!made.ok()) return made.status();
  exchange_ = *std::move(made);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint8_t>> ExchangeRank::Run(const HostBatch& batch, uint32_t step,
                                                       DType output) {
  const DeviceBatch device_batch(batch, spec_.hidden_size, output);
  EXPERTD_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(nullptr));
  absl::Status status =
      exchange_->Enqueue(spec_, packed_.view(), device_batch.step(), step, stream_);
  if (status.ok()) status = exchange_->Finish();
  if (!status.ok()) return status;
  return device_batch.OutputBytes();
}

ExchangeRanks::ExchangeRanks(int num_ranks, const ExchangeRanksOptions& options)
    : num_ranks_(num_ranks), options_(options), communicators_(num_ranks), ranks_(num_ranks) {}

absl::StatusOr<std::unique_ptr<ExchangeRanks>> ExchangeRanks::Make(
    const HostLayer& layer, const Placement& placement, const ExchangeRanksOptions& options) {
  std::unique_ptr<ExchangeRanks> ranks(new ExchangeRanks(placement.num_ranks(), options));
  ncclUniqueId id = {};
  if (options.nccl) {
    absl::StatusOr<ncclUniqueId> made = cuda::MakeCommunicatorId();
    if (!made.ok()) return made.status();
    id = *made;
  }
  std::vector<absl::Status> statuses(ranks->num_ranks_);
  ranks->ForEach([&](int rank) {
    ranks->ranks_[rank] = std::make_unique<ExchangeRank>(layer, placement, rank, options);
    if (!options.nccl) return;
    auto made = cuda::Communicator::Create(
        {.id = id, .rank = rank, .num_ranks = ranks->num_ranks_, .limit = absl::Seconds(30)});
    statuses[rank] = made.status();
    if (made.ok()) ranks->communicators_[rank] = *std::move(made);
  });
  absl::Status status = FirstError(statuses);
  if (status.ok()) status = ranks->Open();
  if (!status.ok()) return status;
  return ranks;
}

ExchangeRanks::~ExchangeRanks() {
  ForEach([this](int rank) {
    ranks_[rank].reset();
    communicators_[rank].reset();
  });
}

void ExchangeRanks::ForEach(const std::function<void(int)>& body) const {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    threads.emplace_back([&, rank] {
      EXPECT_EQ(cudaSetDevice(options_.nccl ? rank : 0), cudaSuccess);
      body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

absl::Status ExchangeRanks::Open() {
  std::vector<std::unique_ptr<cuda::RowTransport>> transports(num_ranks_);
  if (!options_.nccl) transports = MakeLocalTransports(num_ranks_);
  std::vector<absl::Status> statuses(num_ranks_);
  ForEach([&](int rank) {
    std::unique_ptr<cuda::RowTransport> transport = std::move(transports[rank]);
    if (options_.nccl && options_.wrap) {
      auto made = cuda::NcclTransport::Create(communicators_[rank].get(), options_.limit, nullptr);
      statuses[rank] = made.status();
      if (!made.ok()) return;
      transport = *std::move(made);
    }
    if (options_.wrap) transport = options_.wrap(rank, std::move(transport));
    statuses[rank] = ranks_[rank]->Open(communicators_[rank].get(), std::move(transport));
  });
  return FirstError(statuses);
}

absl::Status ExchangeRanks::Reopen() {
  ForEach([this](int rank) { ranks_[rank]->Close(); });
  return Open();
}

RankOutputs ExchangeRanks::Run(const RankBatches& batches, DType output) {
  const uint32_t number = ++step_;
  RankOutputs outputs(num_ranks_);
  ForEach([&](int rank) {
    auto result = ranks_[rank]->Run(batches[rank], number, output);
    EXPECT_TRUE(result.ok()) << "rank " << rank << ": " << result.status();
    if (result.ok()) outputs[rank] = *std::move(result);
  });
  return outputs;
}

ExchangeRanks::Step ExchangeRanks::TryRun(const RankBatches& batches,
                                          const std::function<bool(int)>& comes,
                                          const std::function<uint32_t(int)>& number_of) {
  ++step_;
  Step step;
  step.outputs.resize(num_ranks_);
  step.statuses.resize(num_ranks_);
  step.took.resize(num_ranks_);
  ForEach([&](int rank) {
    if (!comes(rank)) return;
    const absl::Time begin = absl::Now();
    auto result = ranks_[rank]->Run(batches[rank], number_of(rank), DType::kBf16);
    step.took[rank] = absl::Now() - begin;
    step.statuses[rank] = result.status();
    if (result.ok()) step.outputs[rank] = *std::move(result);
  });
  return step;
}

}  // namespace expertd::testing
