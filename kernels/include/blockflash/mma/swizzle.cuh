// Layout of 16-bit tiles in shared memory: row-major, with the 16-byte chunks of a row permuted so
// that the eight rows which one ldmatrix phase reads at the same column are in eight different
// groups of banks.
#pragma once

#include <stdint.h>

namespace blockflash {

// A tile whose rows hold `chunks` chunks of 16 bytes (8 elements).
template <int chunks>
struct Swizzle {
  static_assert(chunks % 4 == 0, "rows of 64 bytes at least");
  // Rows of whole 128-byte lines permute 8 chunks by the row; rows of half lines permute 4 chunks
  // by every second row.
  static constexpr int period = chunks % 8 == 0 ? 8 : 4;
  static constexpr int row_bytes = chunks * 16;

  static __device__ __forceinline__ int phase(int row) {
    return (period == 8 ? row : row >> 1) & (period - 1);
  }

  // Byte offset of a chunk.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * row_bytes + (chunk & ~(period - 1)) * 16 +
           (((chunk & (period - 1)) ^ phase(row)) * 16);
  }
};

// The addresses that one lane passes to ldmatrix. They repeat, up to constants, every `period`
// chunks and every 8 rows, so a few registers serve the whole tile and the rest folds into
// immediates.
template <int chunks>
struct LaneAddress {
  static constexpr int steps = Swizzle<chunks>::period / 2;
  uint32_t step[steps];

  // row and chunk (0 or 1) of this lane inside the first 16×16 sub-tile.
  __device__ __forceinline__ LaneAddress(uint32_t tile_smem, int lane_row, int lane_chunk) {
#pragma unroll
    for (int i = 0; i < steps; ++i)
      step[i] = tile_smem + Swizzle<chunks>::offset(lane_row, 2 * i + lane_chunk);
  }

  // Sub-tile at row `row` (a multiple of 8) and columns 16·column16 …
  __device__ __forceinline__ uint32_t at(int row, int column16) const {
    return step[column16 % steps] + row * Swizzle<chunks>::row_bytes +
           column16 / steps * (Swizzle<chunks>::period * 16);
  }
};

// Lane coordinates inside a 16×16 sub-tile for the three ways in which fragments are loaded.
struct LaneCoords {
  int row, chunk;
};
// A operand stored [m][k], or B operand stored [k][n] and loaded transposed.
__device__ __forceinline__ LaneCoords lane_row_major(int lane) { return {lane & 15, lane >> 4}; }
// B operand stored [n][k]: matrices ordered n then k.
__device__ __forceinline__ LaneCoords lane_col_major(int lane) {
  return {(lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1};
}

}  // namespace blockflash
