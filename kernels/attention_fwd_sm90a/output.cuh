// Epilogue of the Hopper attention kernel: accumulators to global memory.
#pragma once

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/params/attention_fwd.h"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/stmatrix.cuh"
#include "layout.cuh"
#include "softmax.cuh"

namespace blockflash {

// What the outputs of a row are multiplied by, where `denominator` sums its rounded probabilities.
// A sink joins the log-sum-exp `log`, too, in one split of the keys.
__device__ __forceinline__ float scale_of_row(const blockflash_scores& scores, int head,
                                              float denominator, float& log,
                                              bool is_first_split = true) {
  float share = 1.f;
  if (scores.sink != nullptr && is_first_split) {
    if constexpr (Config::lse) {
      // The sink joins the unrounded sum, which is 1 at the log-sum-exp.
      float all = 1.f;
      share = join_sink<NaturalUnits>(log, all, NaturalUnits::sink(scores, head));
      share *= ptx::rcp_approx(all);
      log = fmaf(ptx::lg2_approx(all), kLn2, log);
    } else {
      share = join_sink(log, denominator, Log2Units::sink(scores, head));
    }
  }
  // A row without keys has the sum 0 and the output 0. NaN is not equal to 0 and passes through.
  return denominator == 0.f ? 0.f : share * ptx::rcp_approx(denominator);
}

// Normalises and stores the rows of a warpgroup of a query tile, and their log-sum-exp. o holds the
// accumulators, followed by the row sums.
__device__ __forceinline__ void store_output(const Params& params, const QueryTile& tile,
                                             const float (&o)[kOutColumns / 2],
                                             const RowTotals& rows, uint32_t smem, int warpgroup) {
  const blockflash_attention_fwd_params& b = params.base;
  using Element = Config::Element;
  using Traits = ElementTraits<Element>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int warp_row = tile.q_begin + warpgroup * kRowStep + warp * 16;  // first row of this warp
  const int head = tile.head + warpgroup * kHeadStep;
  float scale[2], row_lse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_lse[half] = rows.log[half];
    scale[half] =
        scale_of_row(b.scores, head, kOnes ? o[kDV / 2 + 2 * half] : rows.sum[half], row_lse[half]);
  }
  // The log-sum-exp goes first, since the output needs its registers. Kernels with score terms have
  // none for another condition.
  const int rows_of_lse = kHasTerms && b.lse == nullptr ? 0 : tile.seqlen_q;
  if (Config::lse && lane % 4 == 0) {
    float* const lse = b.lse + tile.batch * b.lse_stride_batch + head * b.lse_stride_head +
                       tile.q_offset + warp_row + accumulator_row(lane, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (warp_row + accumulator_row(lane, 2 * half) < rows_of_lse) lse[8 * half] = row_lse[half];
  }
  const auto word = [&](int d, int half) {
    return Traits::pack(o[4 * d + 2 * half] * scale[half], o[4 * d + 2 * half + 1] * scale[half]);
  };
  const bool packed = b.cu_seqlens_q != nullptr;
  // Through shared memory, one page of 16 rows × 64 columns per panel, and TMA stores. A tensor map
  // knows where the tensor ends but not where a packed sequence does, hence the condition.
  if (kStaged && !(packed && warp_row + 16 > tile.seqlen_q)) {
    const uint32_t pages = smem + kStagingOffset + warpgroup * kOBytes + warp * 2048 * kVPanels;
    if (lane == 0) ptx::tensor_store_wait_read();  // stores of the previous tile
    __syncwarp();
    const int in_row = lane / 8 % 2 * 8 + lane % 8, in_chunk = lane / 16;
#pragma unroll
    for (int d = 0; d < kDV / 8; d += 2) {
      const uint32_t words[4] = {word(d, 0), word(d, 1), word(d + 1, 0), word(d + 1, 1)};
      ptx::stmatrix_x4(
          pages + d / 8 * 2048 + in_row * 128 + (((d % 8 + in_chunk) ^ in_row % 8) * 16), words);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int panel = 0; panel < kVPanels; ++panel)
        ptx::tensor_store_4d(&params.o, panel * 64, tile.q_offset + warp_row, head,
                             packed ? 0 : tile.batch, pages + panel * 2048);
      ptx::tensor_store_commit();
    }
    return;
  }
  // From registers: the four lanes of a row exchange words, so that each stores eight columns.
  const int quad_lane = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + accumulator_row(lane, 2 * half);
    Element* const o_row = static_cast<Element*>(b.o) + tile.batch * b.o_stride_batch * !packed +
                           head * b.o_stride_head +
                           (static_cast<int64_t>(tile.q_offset) + row) * b.o_stride_seq +
                           quad_lane * 8;
#pragma unroll
    for (int d = 0; d < kDV / 8; d += 4) {
      uint32_t words[4] = {word(d, half), word(d + 1, half), word(d + 2, half), word(d + 3, half)};
      quad_transpose(words, quad_lane);
      if (row < tile.seqlen_q && (d + quad_lane) * 8 < b.head_dim_v)
        *reinterpret_cast<uint4*>(o_row + d * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace blockflash
