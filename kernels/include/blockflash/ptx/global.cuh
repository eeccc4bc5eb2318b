// Acquire and release in device memory. PTX ISA, "Memory consistency model".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Writes before a release are visible after an acquire that reads its value.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// Never lowers the value.
__device__ __forceinline__ void max_release(uint32_t* at, uint32_t x) {
  asm volatile("red.release.gpu.global.max.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// Adds 1, or returns to 0 from `last`, and gives the value before. Both an acquire and a release.
__device__ __forceinline__ uint32_t atomic_inc_acq_rel(uint32_t* at, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(at), "r"(last)
               : "memory");
  return before;
}

}  // namespace blockflash::ptx
