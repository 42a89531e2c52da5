#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "kernels/cuda/host_exchange.h"
#include "kernels/cuda/kernel_config.h"
#include "kernels/cuda/moe_layer/params.h"
#include "kernels/cuda/pack_weights.h"
#include "kernels/cuda/unfused_moe.h"
#include "tests/bench/moe_layer/bench_util.h"
#include "tests/bench/moe_layer/ceilings.h"
#include "tests/gpu/testing/rank_site.h"

namespace expertd::bench {

// Random ones that launches take in turns. Of 8 tokens three draws in a row may call a tenth more
// experts than draws do on average.
inline constexpr int kRoutings = 15;

// A "fold" has the experts and pairs of one rank of eight: what one GPU holds here.
struct Geometry {
  const char* name;
  int hidden, intermediate, experts, top_k;
};
const Geometry* FindGeometry(const std::string& name);  // null: there is none

enum class Exchange {
  kLsa,   // inside the kernel, remote stores
  kHost,  // host-launched NCCL around the kernel
};

struct GroupOptions {
  Geometry geometry;
  Recipe recipe = Recipe::kMxfp4;
  int num_ranks = 1;   // R; the layer has R times the geometry's experts
  int max_tokens = 0;  // T of a rank, the largest that is measured
  Exchange exchange = Exchange::kLsa;
  bool partials_bf16 = false;
};

// One layer of random weights on R GPUs, and steps of it. One thread uses it; Launch is called
// inside the site's ForEach.
class LayerGroup {
 public:
  explicit LayerGroup(const GroupOptions& options);
  ~LayerGroup();

  LayerGroup(const LayerGroup&) = delete;
  LayerGroup& operator=(const LayerGroup&) = delete;

  // Inputs and workspace of steps of T tokens a rank: K different experts of the fold a token,
  // every set as likely, spread over the ranks so that each GPU has what one alone has. Nothing is
  // running.
  void SetTokens(int tokens);

  // Steps are numbered alike on all ranks: taken before they are launched.
  uint32_t TakeSteps(int count);
  // The kernel, or the whole step of the exchange around it. `timing`: of this launch, or null.
  void Launch(int rank, int routing, uint32_t step, cudaStream_t stream,
              uint64_t* timing = nullptr);
  // After the stream has passed; with the host's exchange after every step.
  void Finish(int rank);
  // Enqueues a wait for the streams of all ranks to come here.
  void Meet(int rank, uint32_t meeting, cudaStream_t stream);

  // All streams have passed; a fault ends the program.
  void CheckFaults();

  // --- what is measured
  const GroupOptions& options() const { return options_; }
  testing::RankSite& site() { return *site_; }
  const cuda::KernelConfig& config() const { return config_; }
  int tokens() const { return tokens_; }
  int num_experts() const { return options_.geometry.experts * options_.num_ranks; }
  const Gpu& gpu(int rank) const { return ranks_[rank]->gpu; }
  int64_t workspace_bytes() const;  // of a rank, sized for these tokens
  double weight_bytes() const;      // packed, of the experts that a step needs: mean of the ranks
  double flops() const;             // of a rank
  double link_bytes() const;        // that a rank sends in a step: the largest of the ranks
  double dispatch_bytes() const;    // of them, what goes out before the experts run
  void* output(int rank) const { return ranks_[rank]->output; }

  // Rows [first, T) of every rank, one rank behind the other, computed by the plain kernels in f32
  // from this rank's experts only. To be added up over the ranks.
  std::vector<float> PlainPartials(int rank, int routing, int first, cudaStream_t stream);

 private:
  struct Rank {
    Arena arena;  // of the group
    Arena step;   // of these tokens
    Gpu gpu;
    cuda::PackedLayer packed;
    std::vector<uint16_t> host_x;  // [max_tokens, H]
    uint16_t* x = nullptr;
    void* output = nullptr;
    int32_t* count_up = nullptr;  // [E + 1], both placement tables
    cuda::moe_layer::FaultRecord* fault = nullptr;
    const uint32_t* stop = nullptr;
    const void* device_control = nullptr;
    std::vector<int32_t> host_ids;  // [kRoutings, T, K]
    std::vector<float> host_weights;
    int32_t* ids = nullptr;
    float* weights = nullptr;
    int32_t* row_in_request = nullptr;
    std::unique_ptr<cuda::HostExchange> exchange;
  };

  std::vector<int32_t> RankIds(int tokens, int rank, int routing) const;
  void MakeRank(int rank);
  void MakeWeights(Rank& mine, int rank);
  void MakeExchange(int rank);
  layout::WorkspaceShape WorkspaceShape(int tokens) const;
  cuda::moe_layer::MoeLayerParams Params(const Rank& mine, int rank) const;
  cuda::UnfusedStep StepOf(const Rank& mine, int routing) const;

  const GroupOptions options_;
  LayerSpec spec_;
  std::unique_ptr<testing::RankSite> site_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  cuda::KernelConfig config_;
  int tokens_ = 0;
  uint32_t step_ = 0;
};

}  // namespace expertd::bench
