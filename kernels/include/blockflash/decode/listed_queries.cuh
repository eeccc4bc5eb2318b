// Attention by an index: where a query of a list is, which keys it may attend to, and where the
// keys of the list are.
#pragma once

#include <stdint.h>

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/params/attention_index.h"

namespace blockflash {

// The sequence of a row of packed queries, found by the lanes of a warp: the last one that begins
// at or before it. Offsets that do not ascend lead to some sequence, which need not hold the row.
__device__ __forceinline__ int sequence_of_row(const int32_t* cu_seqlens, int batch, int row,
                                               int lane) {
  int first = 0, count = batch;
#pragma unroll 1
  while (count > 1) {
    const int step = (count + 31) / 32, of_lane = lane * step;
    const bool begins = of_lane < count && cu_seqlens[first + of_lane] <= row;
    const int last = 31 - __clz(static_cast<int>(__ballot_sync(~0u, begins) | 1));
    first += last * step, count = min(step, count - last * step);
  }
  return first;
}

// A query of the lists.
struct ListedQuery {
  int sequence, row;  // row: in the sequence, of packed queries in the tensor
  int first_slot;     // in a page, of key 0: not 0 for packed keys alone
  KeyRange visible;   // keys of the sequence that it attends to, if they are listed

  // The same for all lanes of a warp. Whatever the device holds, keys in `visible` are in the
  // cache. A row that is in no sequence attends to nothing.
  static __device__ __forceinline__ ListedQuery of(const blockflash_attention_index_params& params,
                                                   int query, int lane) {
    const blockflash_attention_decode_params& p = params.scaled.decode;
    ListedQuery x;
    int index, count = p.seqlen_q;
    if (p.cu_seqlens_q == nullptr) {
      x.sequence = p.seqlen_q == 1 ? query : query / p.seqlen_q;
      x.row = index = query - x.sequence * p.seqlen_q;
    } else {
      x.sequence = sequence_of_row(p.cu_seqlens_q, p.batch, query, lane);
      x.row = query;
      const PackedRows rows = PackedRows::of(p.cu_seqlens_q, x.sequence, p.total_q, p.seqlen_q);
      index = query - rows.begin, count = rows.length;
    }
    int keys;
    if (params.cu_seqlens_kv == nullptr) {
      x.first_slot = 0, keys = keys_of_sequence(p.cache, x.sequence);
    } else {
      const PackedRows rows =
          PackedRows::of(params.cu_seqlens_kv, x.sequence, p.cache.page_size, p.cache.capacity);
      x.first_slot = rows.begin, keys = rows.length;
    }
    x.visible = {0, 0};
    if (index >= 0 && index < count)
      x.visible = AttentionMask::of(p.scores.window, count, keys).keys_of(index);
    return x;
  }
};

// Where a key is.
struct KeyPlace {
  int page, slot;  // a negative slot: the query does not attend to it

  // Of a position of the list whose entry was read.
  static __device__ __forceinline__ KeyPlace of(const blockflash_attention_index_params& params,
                                                const ListedQuery& query, int entry, int position) {
    const blockflash_kv_cache& cache = params.scaled.decode.cache;
    const int shift = params.lists.granularity_log2;
    // An entry may be any number: compared before it is shifted. Its page is requested before it is
    // known whether the query sees the key.
    const bool may_exist = entry >= 0 && entry <= (cache.capacity - 1) >> shift;
    const int key = may_exist ? (entry << shift) + (position & ((1 << shift) - 1)) : 0;
    KeyPlace x{query.sequence, key};
    if (params.cu_seqlens_kv != nullptr) {
      x = {0, query.first_slot + key};
    } else if (cache.block_table != nullptr && may_exist && key < cache.capacity) {
      // Shifts where pages have a power of two of slots: the first keys wait for this.
      const int size = cache.page_size;
      const int column = (size & (size - 1)) == 0 ? key >> (31 - __clz(size)) : key / size;
      x = {page_of_column(cache, query.sequence, column), key - column * size};
    }
    if (!may_exist || key < query.visible.begin || key >= query.visible.end) x = {0, -1};
    return x;
  }
  __device__ __forceinline__ bool exists() const { return slot >= 0; }
  // From the first element of a key head.
  __device__ __forceinline__ int64_t offset(const blockflash_kv_cache& cache) const {
    return page * cache.k_stride_page + slot * cache.k_stride_slot;
  }
};

// Positions of a list, and how they are divided into splits.
struct ListSplits {
  int positions, splits;

  __device__ __forceinline__ explicit ListSplits(const blockflash_attention_index_params& params)
      : positions(params.lists.capacity << params.lists.granularity_log2),
        splits(positions <= params.chunk ? 1 : (positions + params.chunk - 1) / params.chunk) {}
};

}  // namespace blockflash
