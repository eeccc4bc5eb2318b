// Selection of bytes.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Byte i is the byte of (high, low) that bits 4 i to 4 i + 2 of `selector` name, from the lowest
// one on, or, if bit 4 i + 3 is set, eight copies of the sign of that byte.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(selector));
  return x;
}

}  // namespace blockflash::ptx
