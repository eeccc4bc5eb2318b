// Epilogue for a column-major C: epilogue.cuh with rows and columns exchanged.
#pragma once

#include "blockflash/bsr/epilogue.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/movmatrix.cuh"

namespace blockflash {
namespace {

// Stores one slice, eight rows of a column per lane and round. The slice begins at row at_row and
// column at_column of C. Not inlined: one copy per slice would be half of the kernel.
template <int slice_n, int slice_stride>
__device__ __noinline__ void store_column_slice(const blockflash_bsr_matmul_params& p,
                                                const float* slice, int64_t at_row,
                                                int64_t at_column, bool plain, int lane) {
#pragma unroll 1
  for (int i = lane; i < 2 * slice_n; i += kWarpSize) {
    const int64_t row = at_row + i % 2 * 8, column = at_column + i / 2;
    if (row >= p.m || column >= p.n) continue;
    const int count = static_cast<int>(min(p.m - row, static_cast<int64_t>(8)));
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = slice[(i % 2 * 8 + j) * slice_stride + i / 2] * p.alpha;
    if (!plain)
      apply_epilogue(p, x, column * p.ldc + row, p.bias_per_row ? row : column, p.bias_per_row,
                     count);
    store_piece(p, x, column * p.ldc + row, count);
  }
}

// Like `store_tile_directly`. A warp transposes 8×8 elements at a time and the four lanes of a
// column exchange words, after which each lane has eight rows of a column. Whether columns of C
// consist of such pieces is tested for all tiles alike: after a branch on the warp's own rows the
// compiler would take warps for divergent and generate slower products for the next tile.
template <int n_tiles>
__device__ __forceinline__ bool store_tile_columns_directly(const blockflash_bsr_matmul_params& p,
                                                            const float (&acc)[n_tiles][4],
                                                            int64_t first_row, int64_t first_column,
                                                            int lane) {
  static_assert(n_tiles % 2 == 0, "pieces of 16 columns");
  using Traits = ElementTraits<BsrMatmulElement>;
  constexpr int kDtype =
      std::is_same_v<BsrMatmulElement, __half> ? BLOCKFLASH_DTYPE_F16 : BLOCKFLASH_DTYPE_BF16;
  const bool plain =
      p.beta == 0.f && p.bias == nullptr && p.activation == BLOCKFLASH_ACTIVATION_NONE;
  if (!plain || p.c_dtype != kDtype || !p.c_vectorized || p.m % 8 != 0) return false;
  // After the exchange a lane has piece lane % 4: of the first or second eight columns, the upper
  // or lower eight rows.
  const int64_t column = first_column + lane % 4 / 2 * 8 + lane / 4, row = first_row + lane % 2 * 8;
  const int64_t columns = row < p.m ? p.n - column : 0;  // columns inside of C, from this one on
  uint16_t* const c = static_cast<uint16_t*>(p.c) + column * p.ldc + row;
#pragma unroll
  for (int n = 0; n < n_tiles; n += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = acc[n + i / 2] + i % 2 * 2;
      words[i] = ptx::movmatrix_trans(Traits::pack(pair[0] * p.alpha, pair[1] * p.alpha));
    }
    quad_transpose(words, lane % 4);
    if (n * 8 < columns) ptx::store_16_bytes(c + n * 8 * p.ldc, words);
  }
  return true;
}

// Like `store_tile`, for 16 rows.
template <int slice_n, int slice_stride, int n_tiles>
__device__ __forceinline__ void store_tile_columns(const blockflash_bsr_matmul_params& p,
                                                   const float (&acc)[n_tiles][4], float* slice,
                                                   int64_t first_row, int64_t first_column,
                                                   int lane) {
  if (store_tile_columns_directly(p, acc, first_row, first_column, lane)) return;
  const bool plain =
      p.beta == 0.f && p.bias == nullptr && p.activation == BLOCKFLASH_ACTIVATION_NONE;
#pragma unroll
  for (int n0 = 0; n0 < n_tiles; n0 += slice_n / 8) {
    fill_slice<slice_n, slice_stride>(acc, n0, slice, lane);
    __syncwarp();
    store_column_slice<slice_n, slice_stride>(p, slice, first_row, first_column + n0 * 8, plain,
                                              lane);
    __syncwarp();
  }
}

}  // namespace
}  // namespace blockflash
