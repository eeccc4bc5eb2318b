// New tokens of sequences: new keys, or queries, packed or not.
#pragma once

#include <stdint.h>

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/params/kv_cache.h"

namespace blockflash {

// A token of a batch, packed or not.
struct Token {
  int sequence, index, count;  // its place among the tokens of its sequence
  int batch, row;              // factors of the strides

  static __device__ __forceinline__ Token of(const int32_t* cu_seqlens, int token, int batch,
                                             int seqlen, int total) {
    if (cu_seqlens == nullptr) {
      const int sequence = token / seqlen, index = token - sequence * seqlen;
      return {sequence, index, seqlen, sequence, index};
    }
    // The last sequence that begins at or before the token. Offsets that do not ascend lead to some
    // sequence, which need not hold the token.
    int first = 0, last = batch - 1;
    while (first < last) {
      const int middle = last - (last - first) / 2;
      if (cu_seqlens[middle] <= token)
        first = middle;
      else
        last = middle - 1;
    }
    const PackedRows rows = PackedRows::of(cu_seqlens, first, total, seqlen);
    return {first, token - rows.begin, rows.length, 0, token};
  }
  __device__ __forceinline__ bool exists() const { return index >= 0 && index < count; }
  // Lengths are not clamped here: a token that does not fit keeps its position.
  __device__ __forceinline__ int64_t position(const blockflash_kv_cache& cache) const {
    const int64_t length = cache.seqused == nullptr ? cache.capacity : cache.seqused[sequence];
    return length - count + index;
  }
};

// Rows of all tokens of a batch, which 32 bits count.
__device__ __forceinline__ int rows_of(const int32_t* cu_seqlens, int batch, int seqlen, int total,
                                       int heads) {
  return (cu_seqlens == nullptr ? batch * seqlen : total) * heads;
}

}  // namespace blockflash
