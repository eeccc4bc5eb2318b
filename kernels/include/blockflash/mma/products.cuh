// Matrix products of one warp by mma.sync, with operands in swizzled shared memory.
#pragma once

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"

namespace blockflash {

template <int m_tiles, int n_tiles>
__device__ __forceinline__ void clear(float (&acc)[m_tiles][n_tiles][4]) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.f;
}

// acc = A·Bᵀ over 16·k_steps columns: the rows of A at `a`, and those of B from b_row on at `b`,
// both moved by an offset in bytes, so that tiles of equal shape share their addresses.
template <class Element, int k_steps, int m_tiles, int n_tiles, int chunks>
__device__ __forceinline__ void multiply_transposed(float (&acc)[m_tiles][n_tiles][4],
                                                    const LaneAddress<chunks>& a, uint32_t a_offset,
                                                    const LaneAddress<chunks>& b, int b_row,
                                                    uint32_t b_offset) {
  clear(acc);
#pragma unroll
  for (int k = 0; k < k_steps; ++k) {
    uint32_t fragment[m_tiles][4];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) ptx::ldmatrix_x4(fragment[m], a.at(m * 16, k) + a_offset);
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      uint32_t pair[4];
      ptx::ldmatrix_x4(pair, b.at(b_row + n * 8, k) + b_offset);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc[m][n], fragment[m], pair[0], pair[1]);
        ptx::mma_m16n8k16<Element>(acc[m][n + 1], fragment[m], pair[2], pair[3]);
      }
    }
  }
}

// acc += A·B for one step of 16 rows of B, from row b_row and column 16·b_column16 on; `fragment`
// holds the 16 columns of A.
template <class Element, int m_tiles, int n_tiles, int chunks>
__device__ __forceinline__ void accumulate_step(float (&acc)[m_tiles][n_tiles][4],
                                                const uint32_t (&fragment)[m_tiles][4],
                                                const LaneAddress<chunks>& b, int b_row,
                                                int b_column16, uint32_t b_offset) {
#pragma unroll
  for (int n = 0; n < n_tiles; n += 2) {
    uint32_t pair[4];
    ptx::ldmatrix_x4_trans(pair, b.at(b_row, b_column16 + n / 2) + b_offset);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      ptx::mma_m16n8k16<Element>(acc[m][n], fragment[m], pair[0], pair[1]);
      ptx::mma_m16n8k16<Element>(acc[m][n + 1], fragment[m], pair[2], pair[3]);
    }
  }
}

// Two neighbouring accumulator tiles, rounded to 16 bits, have the layout of an A operand.
template <class Element, int m_tiles, int n_tiles>
__device__ __forceinline__ void round_to_fragment(const float (&acc)[m_tiles][n_tiles][4], int step,
                                                  uint32_t (&fragment)[m_tiles][4]) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &acc[m][2 * step + i / 2][i % 2 * 2];
      fragment[m][i] = ElementTraits<Element>::pack(pair[0], pair[1]);
    }
}

}  // namespace blockflash
