// Loads of what nobody writes while the kernel runs.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Stays where it is: the compiler moves other loads to where their values are used.
__device__ __forceinline__ uint32_t load_readonly(const uint32_t* at) {
  uint32_t x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(at));
  return x;
}

}  // namespace blockflash::ptx
