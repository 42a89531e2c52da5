#pragma once

#include "kernels/cuda/ptx/memory.cuh"
#include "kernels/layout/workspace.h"

// How small things cross to a peer: as records of 16 bytes, three words and the step, each stored
// and loaded by one access that does not tear. So a record tells by itself that it has come: no
// barrier, no fence and no flag, and no order between the stores.
namespace expertd::cuda::moe_layer {

// What crosses in the last word is the step and the other three, exclusive or: who wants to know
// the step needs all four. Of a load of which some words are not used ptxas makes narrower ones,
// and of two of those one may come from before the store.
__device__ __forceinline__ uint32_t seal(const uint4& words) {
  return words.x ^ words.y ^ words.z ^ words.w;
}

// {x, y, z, step}
__device__ __forceinline__ void store_record(void* to, uint4 words) {
  words.w = seal(words);
  ptx::st_relaxed_sys_b128(to, words);
}
// As it is now: of this step or of another.
__device__ __forceinline__ uint4 load_record(const void* from) {
  uint4 words = ptx::ld_relaxed_sys_b128(from);
  words.w = seal(words);
  return words;
}

}  // namespace expertd::cuda::moe_layer
