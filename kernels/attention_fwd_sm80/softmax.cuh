// Online softmax over the score fragments of one warp (Milakov & Gimelshein; FlashAttention-2).
//
// The reference subtracted in the exponent is not the running maximum but a value at most `slack`
// below it. It moves, and the accumulators are rescaled, only when a score exceeds it by more. The
// result is exact either way, since the reference cancels, and most tiles need neither shuffles nor
// a rescale. 2^slack must not overflow the 16-bit probabilities.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/exponent.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/params/scores.h"
#include "blockflash/ptx/math.cuh"

namespace blockflash {

constexpr float kSoftmaxSlack = 8.f;  // in powers of two

// m_tiles sub-tiles of 16 query rows. A lane holds rows g and g + 8 of each, index [m][half].
template <int m_tiles>
struct OnlineSoftmax {
  float reference[m_tiles][2];  // log2 units
  float sum[m_tiles][2];        // this lane's share of the denominator

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -CUDART_INF_F;
        sum[m][half] = 0.f;
      }
  }

  // A fully masked row keeps its reference at -inf; 0 instead avoids -inf - -inf.
  static __device__ __forceinline__ float finite(float reference) {
    return reference == -CUDART_INF_F ? 0.f : reference;
  }

  // Changes the scores of rows beyond `kFusedLimit`.
  template <int kv_tiles>
  __device__ __forceinline__ void change(float (&s)[m_tiles][kv_tiles][4],
                                         float (&subtract)[m_tiles][2],
                                         const blockflash_scores& scores) const {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!is_beyond_fused(reference[m][half])) continue;
        subtract[m][half] = 0.f;
#pragma unroll
        for (int n = 0; n < kv_tiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i)
            s[m][n][i] = with_rounded_product(s[m][n][i], scores.scale_log2,
                                              scores.inverse_scale_log2, reference[m][half], 0.f);
      }
  }

  // Turns scores s, -inf where masked, into unnormalised probabilities, and rescales o when a
  // reference moves. `sharers` are the warps that have the other scores of these rows.
  template <int kv_tiles, int d_tiles, class Sharers>
  __device__ __forceinline__ void update(float (&s)[m_tiles][kv_tiles][4],
                                         float (&o)[m_tiles][d_tiles][4],
                                         const blockflash_scores& scores, const Sharers& sharers) {
    float largest[m_tiles][2], subtract[m_tiles][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = -CUDART_INF_F;
#pragma unroll
        for (int n = 0; n < kv_tiles; ++n)
          x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        largest[m][half] = x * scores.scale_log2;
        grew |= largest[m][half] > reference[m][half] + kSoftmaxSlack ||
                may_be_beyond_fused(reference[m][half]);
        subtract[m][half] = finite(reference[m][half]);
      }
    if (sharers.any(grew)) {
      sharers.largest(largest);
      bool beyond = false;
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float moved = fmaxf(reference[m][half], quad_max(largest[m][half]));
          const float rescale = ptx::ex2_approx(reference[m][half] - finite(moved));
          reference[m][half] = moved, subtract[m][half] = finite(moved);
          sum[m][half] *= rescale;
#pragma unroll
          for (int d = 0; d < d_tiles; ++d) {
            o[m][d][2 * half] *= rescale;
            o[m][d][2 * half + 1] *= rescale;
          }
          beyond |= is_beyond_fused(moved);
        }
      if (beyond) change(s, subtract, scores);
    }
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float partial = 0.f;  // sum of this key tile alone, so that a long row loses few bits
#pragma unroll
        for (int n = 0; n < kv_tiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[m][n][i] = ptx::ex2_approx(fmaf(s[m][n][i], scores.scale_log2, -subtract[m][half]));
            partial += s[m][n][i];
          }
        sum[m][half] += partial;
      }
  }
};

}  // namespace blockflash
