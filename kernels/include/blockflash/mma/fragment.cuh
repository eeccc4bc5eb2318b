// The accumulator layout of mma.sync and WGMMA: a tile of 16 rows × 8 columns is held by a warp
// with four elements per lane. The four lanes that share a row are a quad.
#pragma once

#include <stdint.h>

namespace blockflash {

// Row and column inside the tile of a lane's element i.
__device__ __forceinline__ int accumulator_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
__device__ __forceinline__ int accumulator_column(int lane, int i) { return lane % 4 * 2 + i % 2; }

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Lane t holds word t of four 16-byte pieces v[0…3]; afterwards it holds the four words of piece t.
__device__ __forceinline__ void quad_transpose(uint32_t (&v)[4], int lane) {
  const bool upper = lane & 2;
  const uint32_t a = __shfl_xor_sync(~0u, upper ? v[0] : v[2], 2);
  const uint32_t b = __shfl_xor_sync(~0u, upper ? v[1] : v[3], 2);
  // Selects instead of indexed writes: a run-time index would put v into local memory.
  v[0] = upper ? a : v[0];
  v[1] = upper ? b : v[1];
  v[2] = upper ? v[2] : a;
  v[3] = upper ? v[3] : b;
  const bool odd = lane & 1;
  const uint32_t c = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
  const uint32_t d = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  v[0] = odd ? c : v[0];
  v[1] = odd ? v[1] : c;
  v[2] = odd ? d : v[2];
  v[3] = odd ? v[3] : d;
}

}  // namespace blockflash
