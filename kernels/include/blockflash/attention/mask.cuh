// Which keys a query attends to: causal masks, sliding windows, ends of sequences.
#pragma once

#include <stdint.h>

#include "blockflash/params/attention_fwd.h"

namespace blockflash {

// Keys [begin, end).
struct KeyRange {
  int begin, end;
};

struct AttentionMask {
  int seqlen_kv;
  int diagonal;  // the key with which query 0 is aligned
  int window_left, window_right;

  // Keys that query `row` attends to. Positions are 64-bit where windows may be as large as an int.
  template <class Position = int64_t>
  __device__ __forceinline__ KeyRange keys_of(int row) const {
    const Position center = static_cast<Position>(row) + diagonal;
    const Position begin = window_left == BLOCKFLASH_WINDOW_UNBOUNDED ? 0 : center - window_left;
    const Position end =
        window_right == BLOCKFLASH_WINDOW_UNBOUNDED ? seqlen_kv : center + window_right + 1;
    return {static_cast<int>(begin < 0           ? 0
                             : begin > seqlen_kv ? seqlen_kv
                                                 : begin),
            static_cast<int>(end < 0           ? 0
                             : end > seqlen_kv ? seqlen_kv
                                               : end)};
  }

  // Keys that some query of [first_row, last_row] attends to. Both ends grow with the row.
  template <class Position = int64_t>
  __device__ __forceinline__ KeyRange keys_of_any(int first_row, int last_row) const {
    return {keys_of<Position>(first_row).begin, keys_of<Position>(last_row).end};
  }

  // Keys that every query of [first_row, last_row] attends to.
  template <class Position = int64_t>
  __device__ __forceinline__ KeyRange keys_of_all(int first_row, int last_row) const {
    return {keys_of<Position>(last_row).begin, keys_of<Position>(first_row).end};
  }
};

}  // namespace blockflash
