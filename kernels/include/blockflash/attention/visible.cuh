// Masks of a lane's accumulators as bits.
#pragma once

#include <stdint.h>

namespace blockflash {

// Bit 2 j + e is set when key 8 j + e is in [begin, end), both relative to the lane's first key.
__device__ __forceinline__ uint32_t visible_keys(int begin, int end) {
  const auto below = [](int limit) {
    const int count = max((limit >> 3) * 2 + min(limit & 7, 2), 0);
    return count >= 32 ? ~0u : (1u << count) - 1;
  };
  return below(end) & ~below(begin);
}

}  // namespace blockflash
