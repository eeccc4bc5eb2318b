// What all kernels of the attention backward share: the probabilities and their gradients, the
// row statistics in the workspace, and the rows of an output.
//
// With s = q·kᵀ·scale, p = exp(s - lse), dp = dO·vᵀ and delta = rowsum(dO∘o):
// ds = p∘(dp - delta), dv = pᵀ·dO, dq = ds·k·scale, dk = dsᵀ·q·scale.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include <type_traits>

#include "blockflash/attention/exponent.cuh"
#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/math.cuh"

namespace blockflash {

// Row statistics have room for whole tiles of this number of queries in every sequence, so that a
// tile can be copied without looking at its end.
constexpr int kStatisticsTile = 64;

// Where the statistics of a sequence begin in its head: packed sequences begin at a multiple of
// kStatisticsTile behind the padded rows of the sequences before them.
__device__ __forceinline__ int64_t statistics_row(bool packed, int batch, int q_offset) {
  if (!packed) return 0;
  return (static_cast<int64_t>(q_offset) + static_cast<int64_t>(batch) * kStatisticsTile) /
         kStatisticsTile * kStatisticsTile;
}

// What a workspace holds of the log-sum-exp of a query: -lse·log2(e), which is what a fused
// multiply-add takes (exponent.cuh); beyond `kFusedLimit` -2·lse, which is beyond it, too. With a
// softcap always the former: gradients are inexact where capped scores pass the limit.
__device__ __forceinline__ float negative_log_of(float lse, float softcap) {
  const float log = -lse * kLog2e;
  return is_beyond_fused(log) && softcap == 0.f ? -2.f * lse : log;
}

// The exponent of a probability, from a score and the negative logarithm of its query.
struct FusedExponent {
  __device__ __forceinline__ float operator()(float x, float scale_log2, float negative_log) const {
    return fmaf(x, scale_log2, negative_log);
  }
};

// The same where the query may be beyond the limit, in natural units. Our forward pass rounded the
// largest score in the same steps when it became the log-sum-exp, so its exponent is exactly 0. The
// log-sum-exp of another library may differ from it in the last bits, of which each is worth .5 and
// more beyond 2^22: there scores within a few of them have the exponent 0, too.
struct ExponentOfLarge {
  __device__ __forceinline__ float operator()(float x, float scale_log2, float negative_log) const {
    const bool large = is_beyond_fused(negative_log);
    const float size = fabsf(negative_log);
    const float bits = !large ? -FLT_MAX : size > 0x1p23f ? size * 0x1p-22f : 0.f;
    const float log = __fmul_rn(__fmul_rn(x, scale_log2), kLn2);
    const float natural = fmaf(negative_log, large ? 0.5f : kLn2, log);
    return natural + bits >= 0.f ? 0.f : natural * kLog2e;
  }
};

// Of the pairs of a tile: kPlain; kCapped, scores have a softcap; kLarge, a query may be beyond
// `kFusedLimit`, and there is no softcap.
enum class Pairs { kPlain, kCapped, kLarge };
template <Pairs pairs>
struct PairsAre {
  static constexpr Pairs value = pairs;
};

// One pair of a query and a key: turns the score s = q·k into the probability and dp = dO·v into
// the gradient of the (scaled) score. `negative_log` is that of the query. A masked pair has both 0
// by selection, since 0·NaN would be NaN.
template <Pairs pairs>
__device__ __forceinline__ void differentiate(float& s, float& dp, const blockflash_scores& scores,
                                              float negative_log, float delta, bool visible) {
  float slope = 1.f;
  float x = s;
  if constexpr (pairs == Pairs::kCapped) {
    slope = soft_cap_slope(x, scores);
    x = soft_cap(x, scores);
  }
  using Exponent = std::conditional_t<pairs == Pairs::kLarge, ExponentOfLarge, FusedExponent>;
  const float p = ptx::ex2_approx(Exponent{}(x, scores.scale_log2, negative_log));
  const float ds = p * (dp - delta) * slope;
  s = visible ? p : 0.f;
  dp = visible ? ds : 0.f;
}

// Stores the accumulators of rows row0 + 16 m + g (g = lane / 4) and 8 further, 16 bytes per lane.
// Columns count from `column0`.
template <class Element, int m_tiles, int n_tiles>
__device__ __forceinline__ void store_rows(const float (&acc)[m_tiles][n_tiles][4], float factor,
                                           void* first, int64_t row_stride, int row0, int rows,
                                           int column0, int columns, int lane) {
  static_assert(n_tiles % 4 == 0, "four MMA tiles are stored at a time");
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m * 16 + accumulator_row(lane, 2 * half);
      Element* const out = static_cast<Element*>(first) + row * row_stride;
#pragma unroll
      for (int d = 0; d < n_tiles; d += 4) {
        uint32_t piece[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          piece[i] = ElementTraits<Element>::pack(acc[m][d + i][2 * half] * factor,
                                                  acc[m][d + i][2 * half + 1] * factor);
        quad_transpose(piece, lane);
        const int column = column0 + (d + (lane & 3)) * 8;
        if (row < rows && column < columns)
          *reinterpret_cast<uint4*>(out + column) =
              make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
}

}  // namespace blockflash
