// Named barriers among some warps of a CTA (bar, barrier). PTX ISA, "Parallel synchronization".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Waits until `threads` threads have waited here or arrived.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace blockflash::ptx
