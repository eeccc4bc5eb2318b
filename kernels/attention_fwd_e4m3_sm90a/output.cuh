// Epilogue: accumulators to global memory.
#pragma once

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "layout.cuh"
#include "softmax.cuh"

namespace blockflash {

// Normalises and stores the rows of a warpgroup of a query tile, and their log-sum-exp.
template <class Softmax>
__device__ __forceinline__ void store_output(const Params& params, const QueryTile& tile,
                                             const float (&o)[kD / 2], const Softmax& softmax,
                                             float v_scale, int warpgroup) {
  const blockflash_attention_fwd_params& b = params.fwd.base;
  using Traits = ElementTraits<Config::Output>;
  const int lane = threadIdx.x % 32;
  const int first_row =
      tile.q_begin + warpgroup * kRowStep + threadIdx.x / 32 % 4 * 16 + accumulator_row(lane, 0);
  const bool packed = b.cu_seqlens_q != nullptr;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float denominator = quad_sum(softmax.sum[half]);
    float log = log_of_sum(softmax.reference[half], denominator), share = v_scale;
    if (b.scores.sink != nullptr) {
      // The sink joins the sum, which is 1 at the log-sum-exp.
      float all = 1.f;
      share *= join_sink<NaturalUnits>(log, all, NaturalUnits::sink(b.scores, tile.head));
      share *= ptx::rcp_approx(all);
      log = fmaf(ptx::lg2_approx(all), kLn2, log);
    }
    const int row = first_row + 8 * half;
    if (row >= tile.seqlen_q) continue;
    if (b.lse != nullptr && lane % 4 == 0)
      b.lse[tile.batch * b.lse_stride_batch + tile.head * b.lse_stride_head + tile.q_offset + row] =
          log;
    // A row without keys has the sum 0 and the output 0. NaN is not equal to 0 and passes through.
    const float factor = denominator == 0.f ? 0.f : share * ptx::rcp_approx(denominator);
    const int first_column = 4 * (lane % 4);
    Config::Output* const to =
        static_cast<Config::Output*>(b.o) + tile.batch * b.o_stride_batch * !packed +
        tile.head * b.o_stride_head + (static_cast<int64_t>(tile.q_offset) + row) * b.o_stride_seq +
        first_column;
    // Two neighbouring accumulator tiles have four neighbouring columns.
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const float* const x = o + 8 * i + 2 * half;
      if (16 * i + first_column < b.head_dim_v)
        *reinterpret_cast<uint2*>(to + 16 * i) = make_uint2(
            Traits::pack(x[0] * factor, x[4] * factor), Traits::pack(x[1] * factor, x[5] * factor));
    }
  }
}

}  // namespace blockflash
