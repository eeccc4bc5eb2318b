// Where the keys of a cache are.
#pragma once

#include <stdint.h>

#include "blockflash/params/kv_cache.h"

namespace blockflash {

// Keys of a sequence. Lengths and page numbers are data on the device that nobody has validated;
// whatever they hold, all that follows from them is inside the cache.
__device__ __forceinline__ int keys_of_sequence(const blockflash_kv_cache& cache, int sequence) {
  if (cache.seqused == nullptr) return cache.capacity;
  return min(max(cache.seqused[sequence], 0), cache.capacity);
}

// The page of a column of the block table, which exists.
__device__ __forceinline__ int page_of_column(const blockflash_kv_cache& cache, int sequence,
                                              int column) {
  if (cache.block_table == nullptr) return sequence;
  return min(max(cache.block_table[sequence * cache.block_table_stride + column], 0),
             cache.pages - 1);
}

}  // namespace blockflash
