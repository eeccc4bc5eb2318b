// Epilogue by TMA stores (sm_90) for the most common case: a row-major C of the type of A, and beta
// 0.
#pragma once

#include "blockflash/bsr/epilogue.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/mbarrier.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/stmatrix.cuh"
#include "blockflash/ptx/tensor_copy.cuh"

namespace blockflash {
namespace {

// A page is 16 rows × 64 columns in the 128-byte swizzle.
constexpr int kPageBytes = 16 * 128;

// Not unrolled over the accumulators: the erf of gelu would be most of the kernel.
__device__ __noinline__ float2 gelu(float2 x) {
  return make_float2(activate(x.x, BLOCKFLASH_ACTIVATION_GELU),
                     activate(x.y, BLOCKFLASH_ACTIVATION_GELU));
}

template <int activation>
__device__ __forceinline__ float2 activated(float2 x) {
  if constexpr (activation == BLOCKFLASH_ACTIVATION_GELU) return gelu(x);
  return make_float2(activate(x.x, activation), activate(x.y, activation));
}

// The bias of two columns, or of a row for both columns; zeros without a bias.
struct PairBias {
  using Traits = ElementTraits<BsrMatmulElement>;
  const uint16_t* columns;  // from this lane's first column on; null: none
  float row[2];             // of the lane's upper and lower row
  int64_t left;             // columns left in C

  __device__ __forceinline__ PairBias(const blockflash_bsr_matmul_params& p, int first_row,
                                      int first_column, int lane) {
    const uint16_t* const bias = static_cast<const uint16_t*>(p.bias);
    columns = bias == nullptr || p.bias_per_row ? nullptr
                                                : bias + first_column + accumulator_column(lane, 0);
    left = p.n - first_column - accumulator_column(lane, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = first_row + accumulator_row(lane, 0) + 8 * half;
      row[half] = bias != nullptr && p.bias_per_row && at < p.m ? Traits::to_float(bias[at]) : 0.f;
    }
  }

  // The bias of the columns 8·n and 8·n + 1 further on, for both rows.
  __device__ __forceinline__ void load(float2 (&bias)[2], int n) const {
    float2 column = make_float2(0.f, 0.f);
    // Columns end at a multiple of eight.
    if (columns != nullptr && n * 8 < left)
      column = make_float2(Traits::to_float(columns[n * 8]), Traits::to_float(columns[n * 8 + 1]));
#pragma unroll
    for (int half = 0; half < 2; ++half)
      bias[half] = make_float2(row[half] + column.x, row[half] + column.y);
  }
};

// `biased`: there may be a bias. Testing for one at each pair takes time.
template <int pages, int activation, bool biased, int n_tiles>
__device__ __forceinline__ void store_activated_by_copies(
    const blockflash_bsr_matmul_tma_params& params, const float (&acc)[n_tiles][4], uint32_t smem,
    int first_row, int first_column, int lane) {
  using Traits = ElementTraits<BsrMatmulElement>;
  const float alpha = params.base.alpha;
  const PairBias bias(params.base, first_row, first_column, lane);
  const int in_row = lane % 16, in_chunk = lane / 16;
#pragma unroll
  for (int n0 = 0; n0 < n_tiles; n0 += 8) {
    const uint32_t page = smem + n0 / 8 % pages * kPageBytes;
    if (lane == 0) ptx::tensor_store_wait_read<pages - 1>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        float2 terms[2] = {};
        if constexpr (biased) bias.load(terms, n0 + n + i / 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const pair = acc[n0 + n + i / 2] + half * 2;
          const float2 x = activated<activation>(make_float2(fmaf(pair[0], alpha, terms[half].x),
                                                             fmaf(pair[1], alpha, terms[half].y)));
          words[i + half] = Traits::pack(x.x, x.y);
        }
      }
      ptx::stmatrix_x4(page + in_row * 128 + (((n + in_chunk) ^ in_row % 8) * 16), words);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::tensor_store_2d(&params.c, first_column + n0 * 8, first_row, page);
      ptx::tensor_store_commit();
    }
  }
}

// Stores 16 rows × 8·n_tiles columns of a warp through its `pages` at `smem`. The warp continues
// while TMA reads the pages. The tensor map of C knows where C ends.
template <int pages, int n_tiles>
__device__ __forceinline__ void store_tile_by_copies(const blockflash_bsr_matmul_tma_params& params,
                                                     const float (&acc)[n_tiles][4], uint32_t smem,
                                                     int first_row, int first_column, int lane) {
  switch (params.base.activation) {
    case BLOCKFLASH_ACTIVATION_RELU:
      return store_activated_by_copies<pages, BLOCKFLASH_ACTIVATION_RELU, true>(
          params, acc, smem, first_row, first_column, lane);
    case BLOCKFLASH_ACTIVATION_GELU:
      return store_activated_by_copies<pages, BLOCKFLASH_ACTIVATION_GELU, true>(
          params, acc, smem, first_row, first_column, lane);
    case BLOCKFLASH_ACTIVATION_SILU:
      return store_activated_by_copies<pages, BLOCKFLASH_ACTIVATION_SILU, true>(
          params, acc, smem, first_row, first_column, lane);
    default:
      if (params.base.bias == nullptr)
        return store_activated_by_copies<pages, BLOCKFLASH_ACTIVATION_NONE, false>(
            params, acc, smem, first_row, first_column, lane);
      return store_activated_by_copies<pages, BLOCKFLASH_ACTIVATION_NONE, true>(
          params, acc, smem, first_row, first_column, lane);
  }
}

}  // namespace
}  // namespace blockflash
