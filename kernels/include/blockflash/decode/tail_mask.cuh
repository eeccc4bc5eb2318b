// The mask of the last keys of a sequence (params/tail_mask.h).
#pragma once

#include <limits.h>
#include <stdint.h>

#include "blockflash/params/tail_mask.h"
#include "blockflash/ptx/readonly_if.cuh"

namespace blockflash {

// The row of a query.
struct TailRow {
  const uint8_t* entries;
  int first, end;  // it has entries for the keys in between that are not below 0

  // `Item` is a DecodeItem or a DecodeRun. A query that does not exist has no entries.
  template <class Item>
  static __device__ __forceinline__ TailRow of(const blockflash_tail_mask& mask, const Item& item,
                                               int query) {
    const bool exists = mask.visible != nullptr && query < item.q_length;
    return {mask.visible + item.sequence * mask.stride_batch +
                (static_cast<int64_t>(item.q_begin) + query) * mask.stride_q,
            exists ? item.kv_length - mask.tail : INT_MAX, item.kv_length};
  }

  // Whether it leaves a key, not below 0, as it is.
  __device__ __forceinline__ bool shows(int key) const {
    return ptx::load_byte_if(entries + (key - first), key >= first && key < end) != 0;
  }
};

// Where the keys before `end` end that the mask leaves as they are for all queries.
template <class Item>
__device__ __forceinline__ int end_before_tail(const blockflash_tail_mask& mask, const Item& item,
                                               int end) {
  return mask.visible == nullptr ? end : min(end, item.kv_length - mask.tail);
}

}  // namespace blockflash
