// The visible pairs of a tile of scores in the Hopper kernels of the attention backward.
#pragma once

#include <stdint.h>

namespace blockflash {
namespace {

// Which of a lane's pairs are visible, as bits per row: all of them unless the tile is masked.
struct Visible {
  uint32_t bits[2] = {~0u, ~0u};
  bool masked;

  template <int n>
  __device__ __forceinline__ void hide(float (&x)[n], float value) const {
    if (!masked) return;
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (!(bits[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1)) x[i] = value;
  }
  // Zeros in pairs of 16-bit numbers.
  template <int n>
  __device__ __forceinline__ void clear(uint32_t (&x)[n], uint32_t (&y)[n]) const {
    if (!masked) return;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const uint32_t pair = bits[i % 2] >> i / 2 * 2;
      const uint32_t kept = (pair & 1 ? 0xFFFFu : 0) | (pair & 2 ? 0xFFFF0000u : 0);
      x[i] &= kept, y[i] &= kept;
    }
  }
};

}  // namespace
}  // namespace blockflash
