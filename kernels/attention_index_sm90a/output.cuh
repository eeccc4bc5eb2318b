// From the sums of a row group to the output.
#pragma once

#include "../attention_fwd_small_sm90a/row_end.cuh"
#include "blockflash/ptx/global.cuh"
#include "sums.cuh"

namespace blockflash {
namespace {

// The four lanes of a row exchange words, so that each stores eight columns.
__device__ __forceinline__ void store_results(const IndexTile& tile, const RowGroup& group,
                                              Sums& x) {
  const blockflash_attention_decode_params& d = x.params.index.scaled.decode;
  const blockflash_index_unions& unions = x.params.unions;
  const int quad_lane = threadIdx.x % 4;
  const int64_t sequence = d.cu_seqlens_q != nullptr ? 0 : tile.sequence;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = x.row_of(half), query = small_quotient(row, unions.pack);
    const int in_unit = group.pack * unions.pack + row - query * unions.pack;
    const bool exists = query < group.queries() && in_unit < d.group;
    const int head = tile.unit * d.group + min(in_unit, d.group - 1);
    const int64_t at = tile.q_begin + group.begin + query;
    float reference[1] = {x.reference[half]}, denominator[1] = {quad_sum(x.denominator[half])},
          scale[1];
    end_rows(d.scores, head, reference, denominator, scale);
    if (d.lse != nullptr && quad_lane == 0 && exists)
      d.lse[sequence * d.lse_stride_batch + head * d.lse_stride_head + at] =
          fmaf(ptx::lg2_approx(denominator[0]), kLn2, reference[0] * kLn2);
    Element* const o = static_cast<Element*>(d.o) + sequence * d.o_stride_batch +
                       head * d.o_stride_head + at * d.o_stride_seq + quad_lane * 8;
#pragma unroll
    for (int j = 0; j < Config::head_dim / 8; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = x.o + 4 * (j + i) + 2 * half;
        words[i] = Traits::pack(pair[0] * scale[0], pair[1] * scale[0]);
      }
      quad_transpose(words, quad_lane);
      if (exists && (j + quad_lane) * 8 < d.head_dim_v) ptx::store_16_bytes(o + j * 8, words);
    }
  }
}

}  // namespace
}  // namespace blockflash
