// Named barriers among some warps of a block (bar, barrier). PTX ISA, "Parallel synchronization".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Waits until `threads` threads have come here or arrived.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits, and says whether the value is true in any of the threads.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool value) {
  uint32_t any;
  asm volatile("{.reg .pred mine, all; setp.ne.u32 mine, %1, 0; barrier.cta.red.or.pred all, %2, %3, mine; selp.u32 %0, 1, 0, all;}"
               : "=r"(any)
               : "r"(static_cast<uint32_t>(value)), "r"(id), "r"(threads)
               : "memory");
  return any;
}

}  // namespace blockflash::ptx
