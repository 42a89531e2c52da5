#pragma once

#include <cstdint>
#include <vector>

#include "config/cluster_spec.h"
#include "config/model_spec.h"
#include "tests/gpu/testing/moe_cases.h"
#include "tests/kernels/cuda/simt/rank_layer.h"

// Layers and steps for the emulated kernel, small enough for it.
namespace expertd::simt {

LayerSpec Spec(int64_t hidden, int64_t intermediate, int32_t experts, Recipe recipe);

// Contiguous, or redundant if `slots` of a rank are given.
Placement PlacementOf(int32_t experts, int32_t ranks, int32_t slots = 0);

// A step: tokens[r] random rows on rank r.
RankLayer::Batches Batches(const LayerSpec& spec, const std::vector<int32_t>& tokens, int32_t top_k,
                           testing::Routing routing, uint64_t seed);

// Each rank's outputs are near the double reference.
void ExpectRight(const testing::HostLayer& layer, const RankLayer::Batches& batches,
                 const std::vector<std::vector<float>>& outputs);

// Runs the steps one after the other: no fault, and every output is right.
void ExpectRightSteps(const testing::HostLayer& layer, const Placement& placement,
                      const RankLayer::Options& options,
                      const std::vector<RankLayer::Batches>& steps);

}  // namespace expertd::simt
