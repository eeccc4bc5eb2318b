// From accumulators to C by tensor copies (sm_90): what most products are, C of the type of A and row-major, no epilogue but alpha.
#pragma once

#include "bsr_epilogue.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tensor_copy.cuh"

namespace blockflash {
namespace {

// A page is 16 rows × 64 columns in the 128-byte swizzle.
constexpr int kPageBytes = 16 * 128;

// Stores 16 rows × 8·n_tiles columns of a warp, through its `pages` at `smem`: the warp goes on while the copies read them. The map of C
// knows where it ends.
template <int pages, int n_tiles>
__device__ __forceinline__ void store_tile_by_copies(const blockflash_bsr_matmul_tma_params& params, const float (&acc)[n_tiles][4],
                                                     uint32_t smem, int first_row, int first_column, int lane) {
  using Traits = ElementTraits<BsrMatmulElement>;
  const float alpha = params.base.alpha;
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
      for (int i = 0; i < 4; ++i) {
        const float* const pair = acc[n0 + n + i / 2] + i % 2 * 2;
        words[i] = Traits::pack(pair[0] * alpha, pair[1] * alpha);
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

}  // namespace
}  // namespace blockflash
