// Prefetches of bytes and of TMA boxes into the L2 cache (sm_90). PTX ISA, "Data Movement and
// Conversion: cp.async.bulk.prefetch" and "cp.async.bulk.prefetch.tensor".
#pragma once

#include <stdint.h>

#include "blockflash/params/base.h"

namespace blockflash::ptx {

// Starts the fetch of the box at these coordinates, innermost first.
__device__ __forceinline__ void tensor_prefetch_4d(const blockflash_tensor_map* map, int x, int y,
                                                   int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];"
               :
               : "l"(map), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Starts the fetch of bytes, a multiple of 16.
__device__ __forceinline__ void bulk_prefetch(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(src), "r"(bytes) : "memory");
}

}  // namespace blockflash::ptx
