// Copies 16-bit tiles from global memory into swizzled shared memory with all threads of a CTA.
#pragma once

#include <stdint.h>

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {

// A tile of `rows` rows with `chunks` chunks of 8 elements. Every thread owns the same chunks of
// each tile that it copies.
template <int rows, int chunks, int threads>
struct TileCopy {
  // Threads side by side span the largest power of two that divides the row, so that no index needs
  // a division at run time.
  static constexpr int columns = chunks % 32 == 0   ? 32
                                 : chunks % 16 == 0 ? 16
                                 : chunks % 8 == 0  ? 8
                                                    : 4;
  static constexpr int row_step = threads / columns;
  static_assert(threads % columns == 0 && rows % row_step == 0,
                "the tile must divide evenly among the threads");
  using Layout = Swizzle<chunks>;

  int row, chunk;  // the first chunk of this thread

  __device__ __forceinline__ explicit TileCopy(int thread)
      : TileCopy(thread / columns, thread % columns) {}
  __device__ __forceinline__ TileCopy(int row, int chunk) : row(row), chunk(chunk) {}

  // The same, of which the compiler keeps no offsets for the next tile: for kernels that are short
  // of registers.
  __device__ __forceinline__ TileCopy anew() const {
    return {ptx::opaque(row), ptx::opaque(chunk)};
  }

  // Byte offset of this thread's chunk that is r rows below and c chunks behind its first one.
  // The swizzle repeats every 8 rows and every `columns` chunks, so that few offsets differ by more
  // than a constant.
  static_assert(columns % Layout::period == 0, "the swizzle repeats from column to column");
  __device__ __forceinline__ uint32_t offset(int r, int c) const {
    return Layout::offset(row + r % 8, chunk) + r / 8 * 8 * Layout::row_bytes + c * 16;
  }

  // Starts the copy of rows [0, valid_rows) and columns [0, valid_columns) of `src` and fills the
  // rest of the tile with zeros: a copy of no bytes reads no memory, wherever its source is. One
  // address per thread moves down the rows.
  template <class Element>
  __device__ __forceinline__ void start(uint32_t dst_smem, const Element* src, int64_t row_stride,
                                        int valid_rows, int valid_columns) const {
    const Element* from = src + row * row_stride + chunk * 8;
    const int rows_left = valid_rows - row, columns_left = valid_columns - chunk * 8;
#pragma unroll
    for (int r = 0; r < rows; r += row_step, from += row_step * row_stride)
#pragma unroll
      for (int c = 0; c < chunks; c += columns)
        ptx::cp_async_cg_16(dst_smem + offset(r, c), from + c * 8,
                            r < rows_left && c * 8 < columns_left ? 16 : 0);
  }

  // Whether one of this thread's own chunks, which have arrived, holds a NaN or an infinity.
  template <class Element>
  __device__ __forceinline__ bool has_nonfinite(const unsigned char* tile) const {
    bool found = false;
#pragma unroll
    for (int r = 0; r < rows; r += row_step)
#pragma unroll
      for (int c = 0; c < chunks; c += columns) {
        const uint4 x = *reinterpret_cast<const uint4*>(tile + offset(r, c));
        for (uint32_t word : {x.x, x.y, x.z, x.w})
          found |= is_nonfinite<Element>(word) || is_nonfinite<Element>(word >> 16);
      }
    return found;
  }

  // Replaces NaN and infinity in this thread's own chunks by zero.
  template <class Element>
  __device__ __forceinline__ void clear_nonfinite(unsigned char* tile) const {
#pragma unroll 1
    for (int r = 0; r < rows; r += row_step)
#pragma unroll 1
      for (int c = 0; c < chunks; c += columns) {
        uint16_t* x = reinterpret_cast<uint16_t*>(tile + Layout::offset(row + r, chunk + c));
        for (int i = 0; i < 8; ++i)
          if (is_nonfinite<Element>(x[i])) x[i] = 0;
      }
  }
};

}  // namespace blockflash
