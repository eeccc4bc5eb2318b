// What the kernels of the gradients of attention by lists share: where the queries and the keys of
// a sequence are, and its bins.
#pragma once

#include <stdint.h>

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/params/attention_index_bwd.h"

namespace blockflash {

// Bins have at least this many keys.
constexpr int kBinLog2 = 6;

__device__ __forceinline__ int bin_width_log2(const blockflash_attention_index_bwd_params& p) {
  return max(kBinLog2, p.lists.granularity_log2);
}

// Bits of a word of `visits` that tell the run of a bin of several.
__device__ __forceinline__ int run_bits(const blockflash_attention_index_bwd_params& p) {
  return max(kBinLog2 - p.lists.granularity_log2, 0);
}

// The last of `count` ascending values that is not beyond `x`, or the first one. Where values do
// not ascend it is some of them.
template <class Value>
__device__ __forceinline__ int last_up_to(int count, int x, Value value_of) {
  int at = 0, end = count;
  while (end - at > 1) {
    const int middle = at + (end - at) / 2;
    (value_of(middle) <= x ? at : end) = middle;
  }
  return at;
}

// A sequence of the batch. Offsets of packed ones are data on the device: one thread reads them
// once.
struct IndexedSequence {
  int batch;
  PackedRows queries, keys;  // among the queries of the lists, and in packed keys
  int first_bin;

  static __device__ __forceinline__ IndexedSequence
  of(const blockflash_attention_index_bwd_params& p, int batch) {
    const blockflash_attention_fwd_params& fwd = p.bwd.base;
    const int log2 = bin_width_log2(p);
    if (fwd.cu_seqlens_q == nullptr)
      return {batch,
              {batch * fwd.seqlen_q, fwd.seqlen_q},
              {0, fwd.seqlen_kv},
              batch * ((fwd.seqlen_kv + (1 << log2) - 1) >> log2)};
    const PackedRows queries = PackedRows::of(fwd.cu_seqlens_q, batch, fwd.total_q, fwd.seqlen_q);
    const PackedRows keys = PackedRows::of(fwd.cu_seqlens_kv, batch, fwd.total_kv, fwd.seqlen_kv);
    return {batch, queries, keys, (keys.begin >> log2) + batch};
  }

  static __device__ __forceinline__ IndexedSequence
  of_query(const blockflash_attention_index_bwd_params& p, int query) {
    const blockflash_attention_fwd_params& fwd = p.bwd.base;
    const auto first = [&](int batch) { return fwd.cu_seqlens_q[batch]; };
    return of(p, fwd.cu_seqlens_q == nullptr ? query / fwd.seqlen_q
                                             : last_up_to(fwd.batch, query, first));
  }

  static __device__ __forceinline__ IndexedSequence
  of_bin(const blockflash_attention_index_bwd_params& p, int bin) {
    const blockflash_attention_fwd_params& fwd = p.bwd.base;
    if (fwd.cu_seqlens_q == nullptr) return of(p, bin / (p.bins / fwd.batch));
    const auto first = [&](int batch) {
      return (min(max(fwd.cu_seqlens_kv[batch], 0), fwd.total_kv) >> bin_width_log2(p)) + batch;
    };
    return of(p, last_up_to(fwd.batch, bin, first));
  }

  __device__ __forceinline__ AttentionMask
  mask(const blockflash_attention_index_bwd_params& p) const {
    return AttentionMask::of(p.bwd.base.scores.window, queries.length, keys.length);
  }
};

// The set of lists of a key head.
__device__ __forceinline__ int set_of_head(const blockflash_attention_index_bwd_params& p,
                                           int head_kv) {
  return head_kv / (p.bwd.base.num_heads_kv / p.sets);
}

// Entries of a set.
__device__ __forceinline__ int64_t entries_of_set(const blockflash_attention_index_bwd_params& p) {
  return static_cast<int64_t>(p.set_lists) * p.queries * p.lists.capacity;
}

}  // namespace blockflash
