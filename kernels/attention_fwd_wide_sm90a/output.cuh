// From the sums of a warpgroup to the output.
#pragma once

#include "../attention_fwd_small_sm90a/row_end.cuh"
#include "blockflash/ptx/global.cuh"
#include "sums.cuh"

namespace blockflash {
namespace {

// The four lanes of a row exchange words, so that each stores eight columns.
template <int warpgroup>
__device__ __forceinline__ void store_results(Sums<warpgroup>& x) {
  const blockflash_attention_fwd_params& b = x.params.base;
  const QueryTile& tile = x.work.tile;
  const bool packed = b.cu_seqlens_q != nullptr;
  const int column = warpgroup * 256 + threadIdx.x % 4 * 8;
  float scale[2];
  end_rows(b.scores, tile.head, x.reference, x.denominator, scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile.q_begin + x.first_row() + 8 * half;
    const bool exists = row < tile.seqlen_q;
    if (warpgroup == 0 && b.lse != nullptr && x.is_first_of_row() && exists)
      b.lse[tile.batch * b.lse_stride_batch + tile.head * b.lse_stride_head + tile.q_offset + row] =
          fmaf(ptx::lg2_approx(x.denominator[half]), kLn2, x.reference[half] * kLn2);
    Element* const o = static_cast<Element*>(b.o) + tile.batch * b.o_stride_batch * !packed +
                       tile.head * b.o_stride_head +
                       (static_cast<int64_t>(tile.q_offset) + row) * b.o_stride_seq + column;
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = x.o[j / 16] + 4 * (j % 16 + i) + 2 * half;
        words[i] = Traits::pack(pair[0] * scale[half], pair[1] * scale[half]);
      }
      quad_transpose(words, threadIdx.x % 4);
      if (exists && column + j * 8 < b.head_dim_v) ptx::store_16_bytes(o + j * 8, words);
    }
  }
}

}  // namespace
}  // namespace blockflash
