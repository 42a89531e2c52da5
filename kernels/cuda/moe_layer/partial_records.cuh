#pragma once

#include "kernels/cuda/moe_layer/partial_row.cuh"
#include "kernels/cuda/moe_layer/record.cuh"

// How partial rows cross: a lane's 8 columns of a slice as records. Record k of all lanes is one
// piece of 512 bytes.
//   F32   {c0 c1 c2 step} {c3 c4 c5 step} {c6 c7 0 step}
//   BF16  {c01 c23 c45 step} {c67 0 0 step}
// One buffer is enough: a peer sends those of step s when it knows this rank's routes of step s,
// and those come from a kernel that started when s - 1, and all its loads, had ended.
namespace expertd::cuda::moe_layer {

struct PartialRecords {
  using Columns = PartialRow::Columns;
  using Slice = PartialRow::Slice;
  // A lane's.
  struct Sent {
    uint4 record[layout::kRecordsOfLane];
  };

  // This lane's first record in rank 0's mapping:
  char* mapping;
  int64_t stride;  // from one rank's mapping to the next
  int64_t block;   // bytes of a peer's records
  int32_t rank;
  uint32_t step;
  bool as_bf16;

  __device__ __forceinline__ PartialRecords(const MoeLayerParams& params, int lane)
      : mapping(params.peers.at<char>(0, params.workspace.partial_records) +
                lane * layout::kRecordBytes),
        stride(params.peers.stride),
        block(layout::RecordBytesOfPeer(params.workspace.max_tokens, params.hidden)),
        rank(params.peers.rank),
        step(params.step),
        as_bf16(params.partials_bf16 != 0) {}

  __device__ __forceinline__ uint4* records_of(int from, int to, int item) const {
    return reinterpret_cast<uint4*>(mapping + to * stride + layout::PeerIndex(from, to) * block +
                                    int64_t{item} * (layout::kSliceRecords * layout::kRecordBytes));
  }

  // `to`: this lane's first record of the slice; `inside`: it has columns there.
  __device__ __forceinline__ void store(uint4* to, bool inside, const Columns& sum) const {
    if (!inside) return;
    uint4 first =
        make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), step);
    uint4 second =
        make_uint4(__float_as_uint(sum[3]), __float_as_uint(sum[4]), __float_as_uint(sum[5]), step);
    if (as_bf16) {
      const uint4 pairs = PartialRow::pack(sum);
      first = make_uint4(pairs.x, pairs.y, pairs.z, step);
      second = make_uint4(pairs.w, 0, 0, step);
    } else {
      store_record(to + 64, make_uint4(__float_as_uint(sum[6]), __float_as_uint(sum[7]), 0, step));
    }
    store_record(to, first);
    store_record(to + 32, second);
  }

  // A look at what `owner` sent of one of this rank's items.
  __device__ __forceinline__ void load(int owner, const Slice& slice, int item, Sent& sent) const {
    if (!slice.inside) return;
    const uint4* from = records_of(owner, rank, item);
    sent.record[0] = load_record(from);
    sent.record[1] = load_record(from + 32);
    if (!as_bf16) sent.record[2] = load_record(from + 64);
  }

  // The step if all of a lane's records are of it, or a step that one of them is of instead.
  __device__ __forceinline__ uint32_t found(const Slice& slice, const Sent& sent) const {
    if (!slice.inside) return step;
    if (sent.record[0].w != step) return sent.record[0].w;
    if (sent.record[1].w != step) return sent.record[1].w;
    return as_bf16 ? step : sent.record[2].w;
  }

  __device__ __forceinline__ void add(const Slice& slice, const Sent& sent, Columns& total) const {
    if (!slice.inside) return;
    const uint4& a = sent.record[0];
    const uint4& b = sent.record[1];
    const uint4& c = sent.record[2];
    if (as_bf16) return PartialRow::add(total, make_uint4(a.x, a.y, a.z, b.x), 1.0f);
    total[0] += __uint_as_float(a.x), total[1] += __uint_as_float(a.y);
    total[2] += __uint_as_float(a.z), total[3] += __uint_as_float(b.x);
    total[4] += __uint_as_float(b.y), total[5] += __uint_as_float(b.z);
    total[6] += __uint_as_float(c.x), total[7] += __uint_as_float(c.y);
  }
};

}  // namespace expertd::cuda::moe_layer
