// Scores as integers that have the same order, for choices of the largest ones.
#pragma once

#include <stdint.h>

namespace blockflash {

// A larger score has a larger key, and 0 and -0 have the same. No number has key 0.
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score);
  if (bits == 0x80000000u) return 0x80000000u;
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace blockflash
