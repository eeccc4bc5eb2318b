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

}  // namespace blockflash::ptx
