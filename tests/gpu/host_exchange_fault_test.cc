#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/cuda/host_exchange.h"
#include "kernels/cuda/nccl_comm/communicator.h"
#include "kernels/fatal.h"
#include "kernels/reference/reference.h"
#include "tests/gpu/testing/child_process.h"
#include "tests/gpu/testing/ep_fixture.h"
#include "tests/gpu/testing/exchange_ranks.h"
#include "tests/gpu/testing/fused_layer.h"
#include "tests/gpu/testing/moe_cases.h"

// Steps of the host-launched exchange that do not end well, and ranks as processes that NCCL takes
// for different hosts.
namespace expertd {
namespace {

using cuda::RowTransport;
using cuda::Transfer;
using testing::ChildProcess;
using testing::ExchangeRanks;
using testing::ExchangeRanksOptions;
using ::testing::HasSubstr;
using testing::HostBatch;
using testing::HostLayer;
using testing::RankBatches;
using testing::Routing;

constexpr absl::Duration kLimit = absl::Seconds(2);
constexpr absl::Duration kChildLimit = absl::Seconds(60);

LayerSpec Spec() {
  return {.layer = 3,
          .hidden_size = 512,
          .intermediate_size = 256,
          .num_experts = 16,
          .top_k = 4,
          .swiglu_limit = 1.5f};
}

RankBatches Batches(int num_ranks, uint64_t seed) {
  const HostBatch batch =
      testing::MakeRandomBatch(Spec(), 20 * num_ranks, 4, Routing::kUniform, seed);
  return testing::SplitRows(batch, Spec().hidden_size, std::vector<int32_t>(num_ranks, 20));
}

// A transport that lets the last rank fall silent at the n-th exchange from now.
class Forgetful : public RowTransport {
 public:
  Forgetful(std::unique_ptr<RowTransport> real, int* forget)
      : real_(std::move(real)), forget_(forget) {}
  int32_t rank() const override { return real_->rank(); }
  int32_t num_ranks() const override { return real_->num_ranks(); }
  absl::Status Exchange(absl::Span<const Transfer> sends, absl::Span<const Transfer> receives,
                        cudaStream_t stream) override {
    if (rank() == num_ranks() - 1 && *forget_ >= 0 && (*forget_)-- == 0) silent_ = true;
    if (silent_) return absl::OkStatus();
    return real_->Exchange(sends, receives, stream);
  }
  absl::Status Check() override { return real_->Check(); }
  absl::Status Abort() override { return real_->Abort(); }

 private:
  const std::unique_ptr<RowTransport> real_;
  int* const forget_;
  bool silent_ = false;
};

class HostExchangeFaultTest : public testing::GpuTest {
 protected:
  // As many ranks, through NCCL or on one GPU.
  void Make(int num_ranks, bool nccl) {
    int count = 0;
    ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    if (nccl && count < num_ranks) {
      GTEST_SKIP() << "needs " << num_ranks << " GPUs, found " << count;
    }
    ExchangeRanksOptions options;
    options.nccl = nccl;
    options.max_tokens = 30;
    options.max_top_k = 4;
    options.limit = kLimit;
    options.wrap = [this](int, std::unique_ptr<RowTransport> real) {
      return std::make_unique<Forgetful>(std::move(real), &forget_);
    };
    auto made = ExchangeRanks::Make(layer_, testing::PlacementFor(16, num_ranks), options);
    ASSERT_TRUE(made.ok()) << made.status();
    ranks_ = *std::move(made);
  }

  void ExpectRight(uint64_t seed) {
    const RankBatches batches = Batches(ranks_->num_ranks(), seed);
    const auto outputs = ranks_->Run(batches);
    testing::FusedLayer whole(layer_, 30, 4);
    for (int rank = 0; rank < ranks_->num_ranks(); ++rank) {
      const std::vector<float> plain = whole.RunPlain(batches[rank]);
      EXPECT_LT(reference::RelL2(testing::AsFloats(outputs[rank], DType::kBf16),
                                 std::vector<double>(plain.begin(), plain.end())),
                5e-3);
    }
  }

  ExchangeRanks::Step TryAll() {
    const uint32_t number = ranks_->next_step();
    return ranks_->TryRun(
        Batches(ranks_->num_ranks(), 2), [](int) { return true; },
        [number](int) { return number; });
  }

  const HostLayer layer_ = testing::MakeRandomLayer(Spec(), 1);
  int forget_ = -1;
  std::unique_ptr<ExchangeRanks> ranks_;
};

TEST_F(HostExchangeFaultTest, ARankInAnotherStepIsNamed) {
  Make(3, /*nccl=*/false);
  if (IsSkipped() || HasFatalFailure()) return;
  ExpectRight(1);
  const auto step = ranks_->TryRun(
      Batches(3, 2), [](int) { return true; }, [](int rank) { return rank == 2 ? 8u : 7u; });
  EXPECT_THAT(step.statuses[0].message(),
              HasSubstr("rank 0 is in step 7 layer 3, rank 2 in step 8"));
  EXPECT_THAT(step.statuses[1].message(), HasSubstr("rank 2 in step 8"));
  EXPECT_THAT(step.statuses[2].message(), HasSubstr("rank 0 in step 7"));
  EXPECT_FALSE(TryAll().statuses[0].ok());  // it is over
  ASSERT_EQ(ranks_->Reopen(), absl::OkStatus());
  ExpectRight(3);
}

TEST_F(HostExchangeFaultTest, MoreThanTheBuffersHoldIsRefusedBeforeAnything) {
  Make(1, /*nccl=*/false);
  if (IsSkipped() || HasFatalFailure()) return;
  const auto refused = [&](int32_t tokens, int32_t top_k) {
    const RankBatches batches = {
        testing::MakeRandomBatch(Spec(), tokens, top_k, Routing::kUniform, 1)};
    const auto step = ranks_->TryRun(
        batches, [](int) { return true; }, [](int) { return 5u; });
    EXPECT_EQ(step.statuses[0].code(), absl::StatusCode::kInvalidArgument);
    return std::string(step.statuses[0].message());
  };
  EXPECT_THAT(refused(31, 4), HasSubstr("got 31 tokens, the buffer is sized for 30"));
  EXPECT_THAT(refused(30, 5), HasSubstr("top_k: found 5, expected 1 to 4"));
  ExpectRight(1);
}

class HostExchangeFaultOnEachTest : public HostExchangeFaultTest,
                                    public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HostExchangeFaultOnEachTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Nccl2" : "Local2"; });

// No rank may take garbage for an answer; the exchange itself goes on.
TEST_P(HostExchangeFaultOnEachTest, AStalledLayerKernelFailsTheStepOnAllRanksAndTheNextIsRight) {
  Make(2, GetParam());
  if (IsSkipped() || HasFatalFailure()) return;
  for (const int stalled : {0, 1}) {
    ranks_->exchange(stalled).SetStall(cuda::moe_layer::kStallFc2);
    const auto step = TryAll();
    ranks_->exchange(stalled).SetStall(cuda::moe_layer::kStallNowhere);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_THAT(step.statuses[rank].message(),
                  HasSubstr(absl::StrCat("layer 3: rank ", stalled,
                                         " gave up in its layer kernel: fault 2")));
      EXPECT_FALSE(IsFatal(step.statuses[rank]));
      EXPECT_LT(step.took[rank], kLimit);
    }
    ExpectRight(stalled + 5);
  }
}

TEST_P(HostExchangeFaultOnEachTest, AStoppedRankEndsTheExchangeOnAll) {
  Make(2, GetParam());
  if (IsSkipped() || HasFatalFailure()) return;
  ExpectRight(1);
  ranks_->exchange(0).Stop();
  const auto step = TryAll();
  EXPECT_THAT(step.statuses[0].message(), HasSubstr("it was told to stop"));
  EXPECT_FALSE(step.statuses[1].ok());
  EXPECT_LT(step.took[0], absl::Seconds(1));
  ASSERT_EQ(ranks_->Reopen(), absl::OkStatus());
  ExpectRight(2);
}

TEST_F(HostExchangeFaultTest, APeerThatDoesNotComeIsNamedWithinTheLimit) {
  Make(2, /*nccl=*/true);
  if (IsSkipped() || HasFatalFailure()) return;
  ExpectRight(1);
  for (const int absent : {0, 1}) {
    const uint32_t number = ranks_->next_step();
    const auto step = ranks_->TryRun(
        Batches(2, 2), [absent](int rank) { return rank != absent; },
        [number](int) { return number; });
    const absl::Status& status = step.statuses[1 - absent];
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("step ", number, " layer 3: rank ",
                                                         1 - absent, ": no answer within 2s")));
    EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("missing: counts of rank ", absent)));
    EXPECT_FALSE(IsFatal(status)) << status;
    EXPECT_LT(step.took[1 - absent], kLimit + absl::Seconds(1));
    std::printf("rank %d gave up after %.2f s\n", 1 - absent,
                absl::ToDoubleSeconds(step.took[1 - absent]));
    // The late one gives up too.
    const auto late = ranks_->TryRun(
        Batches(2, 2), [absent](int rank) { return rank == absent; },
        [number](int) { return number; });
    EXPECT_FALSE(late.statuses[absent].ok());
    EXPECT_LT(late.took[absent], kLimit + absl::Seconds(1));
    ASSERT_EQ(ranks_->Reopen(), absl::OkStatus());
    ExpectRight(3);
  }
}

TEST_F(HostExchangeFaultTest, APeerThatIsLostWithinAStepIsNamedWithinTheLimit) {
  Make(2, /*nccl=*/true);
  if (IsSkipped() || HasFatalFailure()) return;
  const std::string missing[] = {"counts of rank 1", "rows of rank 1", "partial rows of rank 1"};
  for (int phase = 0; phase < 3; ++phase) {
    forget_ = phase;
    const auto step = TryAll();
    forget_ = -1;
    EXPECT_THAT(step.statuses[0].message(), HasSubstr("missing: " + missing[phase]));
    EXPECT_FALSE(step.statuses[1].ok());
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_FALSE(IsFatal(step.statuses[rank])) << step.statuses[rank];
      EXPECT_LT(step.took[rank], kLimit + absl::Seconds(1));
    }
    ASSERT_EQ(ranks_->Reopen(), absl::OkStatus());
    ExpectRight(phase + 7);
  }
}

// --- a process a rank

// rank, id, what to do. Prints what came of it.
int RankProcess(const std::vector<std::string>& arguments) {
  const int rank = std::stoi(arguments[0]);
  const std::string bytes = absl::HexStringToBytes(arguments[1]);
  const bool lose = arguments[2] == "lose";
  ncclUniqueId id;
  std::memcpy(&id, bytes.data(), sizeof(id));
  if (cudaSetDevice(rank) != cudaSuccess) return 3;
  auto group = cuda::Communicator::Create(
      {.id = id, .rank = rank, .num_ranks = 2, .limit = absl::Seconds(30)});
  if (!group.ok()) {
    std::printf("group: %s\n", group.status().ToString().c_str());
    return 4;
  }
  std::printf("mapped: %d %s\n", (*group)->mapped(), (*group)->why_not_mapped().c_str());
  const HostLayer layer = testing::MakeRandomLayer(Spec(), 1);
  ExchangeRanksOptions options;
  options.max_tokens = 100;
  options.max_top_k = 4;
  options.limit = lose ? kLimit : absl::Seconds(20);
  testing::ExchangeRank mine(layer, testing::PlacementFor(16, 2), rank, options);
  if (absl::Status status = mine.Open(group->get(), nullptr); !status.ok()) {
    std::printf("open: %s\n", status.ToString().c_str());
    return 5;
  }
  testing::FusedLayer whole(layer, 100, 4);
  for (uint32_t step = 1; step <= 20; ++step) {
    // Sizes of the two ranks differ, and each has none now and then.
    const int32_t tokens = (step + rank) % 4 == 0 ? 0 : static_cast<int32_t>(step * 37 % 90) + rank;
    const auto routing = static_cast<Routing>(step % 5);
    const HostBatch batch = testing::MakeRandomBatch(Spec(), tokens, 4, routing, step * 2 + rank);
    const std::vector<float> plain = whole.RunPlain(batch);
    auto output = mine.Run(batch, step, DType::kBf16);
    if (!output.ok()) {
      std::printf("%s\n", output.status().ToString().c_str());
      return IsFatal(output.status()) ? 8 : 6;
    }
    const double error = reference::RelL2(testing::AsFloats(*output, DType::kBf16),
                                          std::vector<double>(plain.begin(), plain.end()));
    if (!(error < 5e-3)) {
      std::printf("step %u: error %g\n", step, error);
      return 7;
    }
    if (lose && step == 3) {
      std::printf("three steps\n");
      std::fflush(stdout);
      if (rank == 1) absl::SleepFor(kChildLimit);  // until it is killed
    }
  }
  std::printf("right\n");
  return 0;
}
const testing::RegisterChildRole kRankProcess("exchange-rank", RankProcess);

class HostExchangeProcessTest : public testing::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    int count = 0;
    ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    if (count < 2) GTEST_SKIP() << "needs 2 GPUs, found " << count;
  }

  static std::unique_ptr<ChildProcess> Start(int rank, const std::string& id,
                                             const std::string& task) {
    return std::make_unique<ChildProcess>("exchange-rank",
                                          std::vector<std::string>{absl::StrCat(rank), id, task},
                                          std::vector<std::pair<std::string, std::string>>{
                                              {"NCCL_HOSTID", absl::StrCat("host-", rank)},
                                              {"NCCL_P2P_DISABLE", "1"},
                                              {"NCCL_SHM_DISABLE", "1"}});
  }

  static std::string NewId() {
    auto id = cuda::MakeCommunicatorId();
    EXPECT_TRUE(id.ok()) << id.status();
    return absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(&*id), sizeof(*id)));
  }
};

TEST_F(HostExchangeProcessTest, RanksOfDifferentHostsWithoutPeerAccessAnswerRight) {
  const std::string id = NewId();
  const auto first = Start(0, id, "run");
  const auto second = Start(1, id, "run");
  for (ChildProcess* child : {first.get(), second.get()}) {
    EXPECT_EQ(child->Wait(kChildLimit), 0) << child->Output();
    EXPECT_THAT(child->Output(), HasSubstr("mapped: 0"));
    EXPECT_THAT(child->Output(), HasSubstr("right"));
  }
}

TEST_F(HostExchangeProcessTest, AKilledProcessIsNamedWithinTheLimit) {
  const std::string id = NewId();
  const auto first = Start(0, id, "lose");
  const auto second = Start(1, id, "lose");
  ASSERT_TRUE(second->WaitForOutput("three steps", kChildLimit)) << second->Output();
  second->Kill();
  const absl::Time begin = absl::Now();
  EXPECT_EQ(first->Wait(kChildLimit), 6) << first->Output();
  EXPECT_LT(absl::Now() - begin, kLimit + absl::Seconds(8));
  EXPECT_THAT(first->Output(), HasSubstr("missing: counts of rank 1"));
  std::printf("%s", first->Output().c_str());
}

}  // namespace
}  // namespace expertd
