#pragma once

#include <cstdint>

#include "kernels/layout/host_device.h"

// Where a rank's workspace is mapped. The peers' mappings are an affine function of the rank (one
// flat range of equal strides), so an address costs one multiply-add; with one rank it is the
// identity.
namespace expertd::cuda {

struct PeerMap {
  char* base = nullptr;  // mapping of rank 0's workspace
  int64_t stride = 0;    // bytes from one rank's mapping to the next; 0 for one rank
  int32_t rank = 0;      // this rank
  int32_t num_ranks = 1;

  // Address of `offset` bytes into the workspace of `peer`.
  template <typename T>
  EXPERTD_HD T* at(int peer, int64_t offset) const {
    return reinterpret_cast<T*>(base + peer * stride + offset);
  }
};

}  // namespace expertd::cuda
