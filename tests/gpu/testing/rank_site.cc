#include "tests/gpu/testing/rank_site.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device_memory.h"
#include "tests/gpu/testing/device_each_site.h"

namespace expertd::testing {
namespace {

// One allocation: rank r's workspace follows that of rank r - 1, as in the flat range of a window.
class SameDeviceSite : public RankSite {
 public:
  SameDeviceSite(int num_ranks, int64_t workspace_bytes) : RankSite(num_ranks, workspace_bytes) {}

  ~SameDeviceSite() override {
    for (cudaStream_t stream : streams_) {
      if (stream != nullptr) (void)cudaStreamDestroy(stream);
    }
  }

  absl::Status SetUp() {
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaSetDevice(0));
    int num_sms = 0;
    EXPERTD_CUDA_RETURN_IF_ERROR(
        cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
    num_ctas_ = num_sms / num_ranks_;
    if (num_ctas_ == 0)
      return absl::UnavailableError(absl::StrCat("the GPU has ", num_sms, " SMs"));
    const size_t bytes = static_cast<size_t>(workspace_bytes_) * num_ranks_;
    absl::StatusOr<cuda::MemoryBlock> block =
        cuda::MemoryBlock::Allocate(cuda::MemoryKind::kDevice, bytes);
    if (!block.ok()) return block.status();
    workspaces_ = *std::move(block);
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaMemset(workspaces_.data(), 0, bytes));
    EXPERTD_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
    for (int rank = 0; rank < num_ranks_; ++rank) {
      peers_[rank] = {workspaces_.as<char>(), workspace_bytes_, rank, num_ranks_};
      EXPERTD_CUDA_RETURN_IF_ERROR(
          cudaStreamCreateWithFlags(&streams_[rank], cudaStreamNonBlocking));
    }
    return absl::OkStatus();
  }

  absl::Status ForEach(const Work& work) override {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (absl::Status status = work(rank, streams_[rank]); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status ForEachStep(int count, const StepWork& work) override {
    for (int index = 0; index < count; ++index) {
      absl::Status status =
          ForEach([&](int rank, cudaStream_t stream) { return work(rank, index, stream); });
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  cuda::MemoryBlock workspaces_;
};

absl::StatusOr<std::unique_ptr<RankSite>> OpenSameDevice(int num_ranks, int64_t workspace_bytes) {
  auto site = std::make_unique<SameDeviceSite>(num_ranks, workspace_bytes);
  if (absl::Status status = site->SetUp(); !status.ok()) return status;
  return site;
}

}  // namespace

std::string RankModeName(RankMode mode) {
  return mode == RankMode::kSameDevice ? "SameDevice" : "DeviceEach";
}

absl::StatusOr<std::unique_ptr<RankSite>> RankSite::Open(RankMode mode, int num_ranks,
                                                         int64_t workspace_bytes) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    devices = 0;
  }
  const int needed = mode == RankMode::kSameDevice ? 1 : num_ranks;
  if (devices < needed) {
    return absl::UnavailableError(absl::StrCat("needs ", needed, needed == 1 ? " GPU" : " GPUs",
                                               ", this machine has ", devices));
  }
  return mode == RankMode::kSameDevice ? OpenSameDevice(num_ranks, workspace_bytes)
                                       : OpenDeviceEach(num_ranks, workspace_bytes);
}

absl::Status RankSite::Synchronise() {
  return ForEach(
      [](int, cudaStream_t stream) { return EXPERTD_CUDA_STATUS(cudaStreamSynchronize(stream)); });
}

}  // namespace expertd::testing
