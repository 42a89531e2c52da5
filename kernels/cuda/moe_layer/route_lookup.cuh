#pragma once

#include "kernels/cuda/moe_layer/exchange.cuh"
#include "kernels/cuda/moe_layer/shared_memory.cuh"
#include "kernels/cuda/moe_layer/wait.cuh"

// Which slot each route of the step has. Slots are global here: routing keeps those of this rank,
// and notes those of all. What is looked up lies in the ring's memory while routes are sorted.
namespace expertd::cuda::moe_layer {

struct RouteLookup {
  static constexpr uint16_t kNowhere = layout::kNowhere;
  static constexpr uint16_t kReplicated = 0xfffe;  // in `table`: look it up

  const MoeLayerParams& params;
  // In the ring's memory, behind the first stage of weights:
  uint32_t* counts;  // [kRoutingWarps][num_slots]
  uint16_t* table;   // [E] global slot or kReplicated
  uint16_t* cache;   // global slot or kNowhere by route, for the first `cached` of a part
  int cached;

  // The routes that this CTA sorts: all, or its part.
  struct Part {
    int begin;
    int end;
  };

  __device__ __forceinline__ explicit RouteLookup(const MoeLayerParams& p) : params(p) {
    counts = reinterpret_cast<uint32_t*>(ptx::dynamic_shared_memory() + kSortOffset);
    table = reinterpret_cast<uint16_t*>(counts + kRoutingWarps * p.num_slots);
    cache = table + p.num_experts;
    const int left = static_cast<int>(ptx::dynamic_shared_memory() + p.tables_offset -
                                      reinterpret_cast<uint8_t*>(cache));
    cached = left / static_cast<int>(sizeof(uint16_t));
  }

  __device__ __forceinline__ Sources& sources() const { return shared_state().sources; }
  __device__ __forceinline__ int num_routes() const {
    return static_cast<int>(sources().first_route[params.peers.num_ranks]);
  }

  // Slot of this rank, or -1.
  __device__ __forceinline__ int local_slot(uint16_t global_slot) const {
    const int local = global_slot - params.peers.rank * params.slots_per_rank;
    return local >= 0 && local < params.num_slots ? local : -1;
  }

  // Mostly an expert has one slot, and so have those before it: that one is loaded on trust.
  __device__ __forceinline__ void fill_table(int thread) const {
#pragma unroll 1
    for (int expert = thread; expert < params.num_experts; expert += kRoutingThreads) {
      int slot = params.slots[expert];
      const int first = params.first_slot[expert];
      const int count = params.first_slot[expert + 1] - first;
      if (first != expert) slot = params.slots[first];
      table[expert] = count == 1 ? static_cast<uint16_t>(slot) : kReplicated;
    }
  }

  // Global slot of an expert's replica for a row, or kNowhere. row_of() is called where it matters.
  template <typename RowOf>
  __device__ __forceinline__ uint16_t look_up(int expert, RowOf row_of) const {
    if (expert < 0) return kNowhere;
    const uint16_t slot = table[expert];
    if (slot != kReplicated) return slot;
    return static_cast<uint16_t>(placed_slot(params, expert, row_of()));
  }

  __device__ __forceinline__ uint16_t own_slot(int route, int expert) const {
    return look_up(expert, [&] {
      return row_in_request(params, static_cast<int>(params.by_top_k.Quotient(route)));
    });
  }

  // `source` is not above the route's rank, and becomes it.
  __device__ __forceinline__ uint16_t slot_of(int route, int& source) const {
    source = source_of(params, static_cast<uint32_t>(route), source);
    const int rank = params.peers.rank;
    const int in_source = route - static_cast<int>(sources().first_route[source]);
    if (source == rank) return own_slot(in_source, params.ids[in_source]);
    const layout::RouteRecord record = route_record(params, source, in_source);
    return look_up(record.expert, [&] { return record.row; });
  }

  // Looks routes up, as many as there is room for, when their records are here: kAtOnce of a lane
  // are loaded at once. Also waits for the part's other records, so that cached_slot() need not.
  // Who gave up has nothing of what did not come.
  template <int kAtOnce>
  __device__ __forceinline__ void fill_cache(const Part& part, int warp, int lane) const {
    const Waiter waiter{params};
    const int rank = params.peers.rank;
    int source = 0;
    bool waits = true, again = false;
#pragma unroll 1
    for (int first = part.begin + warp * 32; first < part.end; first += kAtOnce * kRoutingThreads) {
      const layout::RouteRecord* records[kAtOnce];
      int experts[kAtOnce];
      uint32_t steps[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int route = first + i * kRoutingThreads + lane;
        records[i] = nullptr;
        experts[i] = -1;
        steps[i] = params.step;
        if (route >= part.end) continue;
        source = source_of(params, static_cast<uint32_t>(route), source);
        const int in_source = route - static_cast<int>(sources().first_route[source]);
        if (source == rank) {
          experts[i] = params.ids[in_source];
        } else {
          records[i] = route_records(params, source, rank) + 1 + in_source;
          steps[i] = ~params.step;
        }
      }
      Awaited what = {kWaitRoutes, 0, rank};
      waits = waits && waiter.wait_for_peer(what, [&] {
        uint32_t found = params.step;
        int missing = -1;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (steps[i] == params.step) continue;
          const layout::RouteRecord record = load_route(records[i]);
          experts[i] = record.expert;
          steps[i] = record.step;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (steps[i] == params.step) continue;
          found = steps[i];
          missing = first + i * kRoutingThreads + lane;
        }
        if (missing >= 0) what = awaited_route(missing);
        return found;
      });
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int route = first + i * kRoutingThreads + lane;
        if (route >= part.end || route - part.begin >= cached) continue;
        again |= keep(route - part.begin, steps[i] == params.step ? experts[i] : -1);
      }
    }
    if (again) look_again(part, warp * 32 + lane);
  }

  // True: it has replicas, look_again() finds the right one.
  __device__ __forceinline__ bool keep(int index, int expert) const {
    const uint16_t slot = expert < 0 ? kNowhere : table[expert];
    cache[index] = slot;
    return slot == kReplicated;
  }

  // Apart from what most routes need. `begin` is the thread's first one, counted from the part's.
  __device__ __forceinline__ void look_again(const Part& part, int begin) const {
    const int routes = min(part.end - part.begin, cached);
    int source = 0;
#pragma unroll 1
    for (int i = begin; i < routes; i += kRoutingThreads) {
      if (cache[i] == kReplicated) cache[i] = slot_of(part.begin + i, source);
    }
  }

  __device__ __forceinline__ Awaited awaited_route(int route) const {
    const int source = source_of(params, static_cast<uint32_t>(route));
    const uint32_t in_source = static_cast<uint32_t>(route) - sources().first_route[source];
    return {kWaitRoutes, 1 + in_source, source};
  }

  // kAll: all of the part is there, as it is of what a CTA sorts alone.
  template <bool kAll>
  __device__ __forceinline__ uint16_t cached_slot(const Part& part, int route, int& source) const {
    const int i = route - part.begin;
    if constexpr (kAll) return cache[i];
    return i < cached ? cache[i] : slot_of(route, source);
  }
};

}  // namespace expertd::cuda::moe_layer
