// Which keys a query attends to: causal, sliding window, ends of sequences.
#pragma once

#include <stdint.h>

#include "params.h"

namespace blockflash {

// Keys [begin, end).
struct KeyRange {
  int begin, end;
};

struct AttentionMask {
  int seqlen_kv;
  int diagonal;  // key that query 0 is aligned with
  int window_left, window_right;

  // Keys that query `row` attends to, apart from the end of the sequence. 64-bit: windows may be as large as an int.
  __device__ __forceinline__ KeyRange keys_of(int row) const {
    const int64_t center = static_cast<int64_t>(row) + diagonal;
    const int64_t begin = window_left == BLOCKFLASH_WINDOW_UNBOUNDED ? 0 : center - window_left;
    const int64_t end = window_right == BLOCKFLASH_WINDOW_UNBOUNDED ? seqlen_kv : center + window_right + 1;
    return {static_cast<int>(begin < 0 ? 0 : begin > seqlen_kv ? seqlen_kv : begin),
            static_cast<int>(end < 0 ? 0 : end > seqlen_kv ? seqlen_kv : end)};
  }

  // Keys that some query of [first_row, last_row] attends to. Both ends grow with the row.
  __device__ __forceinline__ KeyRange keys_of_any(int first_row, int last_row) const {
    return {keys_of(first_row).begin, keys_of(last_row).end};
  }

  // Keys that every query of [first_row, last_row] attends to.
  __device__ __forceinline__ KeyRange keys_of_all(int first_row, int last_row) const {
    return {keys_of(last_row).begin, keys_of(first_row).end};
  }
};

}  // namespace blockflash
