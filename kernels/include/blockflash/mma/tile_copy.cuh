// Copies 16-bit tiles from global memory into swizzled shared memory with all threads of a CTA.
#pragma once

#include <stdint.h>

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/ptx/cp_async.cuh"

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
      : row(thread / columns), chunk(thread % columns) {}

  // Byte offset of this thread's chunk that lies r rows below and c chunks behind its first one.
  // The swizzle repeats every 8 rows and every `columns` chunks, so that few offsets differ by more
  // than a constant.
  static_assert(columns % Layout::period == 0, "the swizzle repeats from column to column");
  __device__ __forceinline__ uint32_t offset(int r, int c) const {
    return Layout::offset(row + r % 8, chunk) + r / 8 * 8 * Layout::row_bytes + c * 16;
  }

  // Starts the copy of rows [0, valid_rows) and columns [0, valid_columns) of `src` and fills the
  // rest of the tile with zeros.
  template <class Element>
  __device__ __forceinline__ void start(uint32_t dst_smem, const Element* src, int64_t row_stride,
                                        int valid_rows, int valid_columns) const {
#pragma unroll
    for (int r = 0; r < rows; r += row_step)
#pragma unroll
      for (int c = 0; c < chunks; c += columns) {
        const bool valid = row + r < valid_rows && (chunk + c) * 8 < valid_columns;
        // An invalid chunk reads nothing, but its address must stay inside the tensor.
        const Element* from = src + (valid ? (row + r) * row_stride + (chunk + c) * 8 : 0);
        ptx::cp_async_cg_16(dst_smem + Layout::offset(row + r, chunk + c), from, valid ? 16 : 0);
      }
  }

  // The same with few instructions for tiles whose rows are all valid, as most are: one address per
  // thread that moves down the rows, and one test per column of chunks.
  template <class Element>
  __device__ __forceinline__ void stream(uint32_t dst_smem, const Element* src, int64_t row_stride,
                                         int valid_rows, int valid_columns) const {
    if (valid_rows >= rows) {
      const Element* from = src + row * row_stride + (chunk * 8 < valid_columns ? chunk * 8 : 0);
#pragma unroll
      for (int r = 0; r < rows; r += row_step, from += row_step * row_stride)
#pragma unroll
        for (int c = 0; c < chunks; c += columns) {
          const bool valid = (chunk + c) * 8 < valid_columns;
          ptx::cp_async_cg_16(dst_smem + offset(r, c), from + (valid ? c * 8 : 0), valid ? 16 : 0);
        }
    } else {
#pragma unroll 1
      for (int r = row; r < rows; r += row_step)
#pragma unroll 1
        for (int c = chunk; c < chunks; c += columns) {
          const bool valid = r < valid_rows && c * 8 < valid_columns;
          ptx::cp_async_cg_16(dst_smem + Layout::offset(r, c),
                              src + (valid ? r * row_stride + c * 8 : 0), valid ? 16 : 0);
        }
    }
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
