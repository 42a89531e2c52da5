#include <nccl_device.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/nccl_comm/device_communicator.h"

namespace expertd::cuda {
namespace {

__global__ void fetch_peer_addresses(ncclWindow_t window, int32_t num_ranks, uint64_t* addresses) {
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    addresses[rank] = reinterpret_cast<uint64_t>(ncclGetLsaPointer(window, 0, rank));
  }
}

}  // namespace

struct DeviceCommunicator::State {
  ncclDevComm comm = {};
};

DeviceCommunicator::DeviceCommunicator() : state_(std::make_unique<State>()) {}
DeviceCommunicator::~DeviceCommunicator() = default;

ncclResult_t DeviceCommunicator::Create(ncclComm_t comm) {
#ifdef NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER  // 2.29 and later: the struct names its version
  ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
  ncclDevCommRequirements requirements = {};
#endif
  return ncclDevCommCreate(comm, &requirements, &state_->comm);
}

ncclResult_t DeviceCommunicator::Destroy(ncclComm_t comm) {
  return ncclDevCommDestroy(comm, &state_->comm);
}

int32_t DeviceCommunicator::lsa_size() const { return state_->comm.lsaSize; }
int32_t DeviceCommunicator::lsa_rank() const { return state_->comm.lsaRank; }

absl::Status LoadWindowKernels() {
  cudaFuncAttributes attributes;
  return EXPERTD_CUDA_STATUS(cudaFuncGetAttributes(&attributes, fetch_peer_addresses));
}

absl::Status FetchPeerAddresses(ncclWindow_t window, int32_t num_ranks, uint64_t* addresses,
                                cudaStream_t stream) {
  fetch_peer_addresses<<<1, 1, 0, stream>>>(window, num_ranks, addresses);
  return EXPERTD_CUDA_STATUS(cudaGetLastError());
}

}  // namespace expertd::cuda
