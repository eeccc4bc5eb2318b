// Online softmax over WGMMA accumulators with few instructions per score.
//
// The reference subtracted in the exponent is the largest score of the first key tile. It stays
// until a score exceeds it by more than `slack` powers of two, which is detected by three-input
// integer maxima and one vote, without shuffles. The result is exact either way, because the
// reference cancels.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "blockflash/attention/exponent.cuh"
#include "blockflash/attention/visible.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/params/scores.h"
#include "blockflash/ptx/math.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {

// The state of a lane's two rows after all keys. It is kept small, since it lives beside the scores
// of the next query tile.
struct RowTotals {
  float log[2];  // natural logarithm of the unrounded sum with `sums_exact`, else the reference
  float sum[2];  // sum of the rounded probabilities, where the tensor cores do not compute it
};

// ln(2^reference · sum). Both terms become natural logarithms before they are added, which rounds a
// smaller number.
__device__ __forceinline__ float log_of_sum(float reference, float sum) {
  return fmaf(ptx::lg2_approx(sum), kLn2, reference * kLn2);
}

// n scores of a lane: s[4 j + 2 half + e] is key 8 j + 2 (lane % 4) + e of its row `half`.
//
// Each row has two sums. The output is divided by the sum of the rounded probabilities, by which V
// is multiplied, so that the rounding error of a dominant probability cancels; unless
// `sums_rounded`, the tensor cores compute it. The log-sum-exp is the logarithm of the sum of the
// unrounded probabilities, computed with `sums_exact`. `threads` of the CTA use it, from
// `first_thread` on.
template <int n, int first_thread, int threads, bool sums_rounded, bool sums_exact>
struct HopperSoftmax {
  // Per row, in powers of two. Of a row beyond `kFusedLimit` it is kLarge, for which scores are
  // changed: then `large_reference` has it.
  float reference[2];
  float sum[2];    // this lane's share of the sum of rounded probabilities
  float exact[2];  // this lane's share of the sum of unrounded probabilities

  // Far enough below 0 that such a row takes the exact path for each key tile.
  static constexpr float kLarge = -64.f;

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = kNoReference;
    if constexpr (sums_rounded) sum[0] = sum[1] = 0.f;
    if constexpr (sums_exact) exact[0] = exact[1] = 0.f;
  }

  // In shared memory, since registers are scarce and such rows are rare. A lane reads what it wrote
  // or what the other lanes of its row wrote, which is the same.
  static __device__ __forceinline__ float& large_reference(int half) {
    __shared__ float of_rows[threads];
    return of_rows[(ptx::opaque(static_cast<int>(threadIdx.x)) & ~3) - first_thread + half];
  }
  __device__ __forceinline__ float true_reference(int half) const {
    return reference[half] == kLarge ? large_reference(half) : reference[half];
  }

  __device__ __forceinline__ RowTotals totals() const {
    RowTotals of;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float log2 = true_reference(half);
      of.log[half] = sums_exact ? log_of_sum(log2, quad_sum(exact[half])) : log2;
      of.sum[half] = sums_rounded ? quad_sum(sum[half]) : 0.f;
    }
    return of;
  }

  // The largest scores of this lane as integers. Valid where one is positive; NaN is above
  // everything.
  static __device__ __forceinline__ void largest(const float (&s)[n], int (&top)[2]) {
    top[0] = __float_as_int(s[0]), top[1] = __float_as_int(s[2]);
#pragma unroll
    for (int i = 0; i < n; i += 4) {
      top[0] = __vimax3_s32(top[0], __float_as_int(s[i]), __float_as_int(s[i + 1]));
      top[1] = __vimax3_s32(top[1], __float_as_int(s[i + 2]), __float_as_int(s[i + 3]));
    }
  }

  // Whether a score of the warp exceeds the reference by more than the slack. A threshold that is
  // not positive cannot be compared as an integer, so it takes the exact path.
  __device__ __forceinline__ bool exceeds(const int (&top)[2], float slack,
                                          float inverse_scale_log2) const {
    const float limit[2] = {(reference[0] + slack) * inverse_scale_log2,
                            (reference[1] + slack) * inverse_scale_log2};
    return __any_sync(~0u, top[0] > __float_as_int(limit[0]) || top[1] > __float_as_int(limit[1]) ||
                               !(limit[0] > 0.f) || !(limit[1] > 0.f));
  }

  // Moves the references up to the largest scores. `rescale` is the factor for everything summed so
  // far.
  __device__ __forceinline__ void move(float (&s)[n], const int (&top)[2],
                                       const blockflash_scores& scores, float (&rescale)[2]) {
    // The largest of negative floats has the smallest bits.
    const bool rare = __any_sync(
        ~0u, top[0] < 0 || top[1] < 0 || reference[0] == kLarge || reference[1] == kLarge);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = __int_as_float(top[half]);
      if (rare) {
        uint32_t bits = __float_as_uint(s[2 * half]);
#pragma unroll
        for (int i = 2 * half; i < n; i += 4)
          bits = __vimin3_u32(bits, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
        if (top[half] < 0) x = __uint_as_float(bits);
        reference[half] = true_reference(half);
      }
      float moved = fmaxf(reference[half], quad_max(x) * scores.scale_log2);
      if (moved == kLarge) moved += 0.5f;  // any other value nearby
      rescale[half] = ptx::ex2_approx(reference[half] - moved);
      reference[half] = moved;
      if constexpr (sums_rounded) sum[half] *= rescale[half];
      if constexpr (sums_exact) exact[half] *= rescale[half];
    }
    if (is_beyond_fused(reference[0]) || is_beyond_fused(reference[1])) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (is_beyond_fused(reference[half])) change(s, half, scores);
    }
  }

  // Changes the scores of a row beyond `kFusedLimit`.
  __device__ __forceinline__ void change(float (&s)[n], int half, const blockflash_scores& scores) {
#pragma unroll
    for (int i = 2 * half; i < n; i += 4)
#pragma unroll
      for (int e = i; e < i + 2; ++e)
        s[e] = with_rounded_product(s[e], scores.scale_log2, scores.inverse_scale_log2,
                                    reference[half], kLarge);
    large_reference(half) = reference[half];
    reference[half] = kLarge;
  }

  // Turns scores into unnormalised probabilities. Each key tile is summed separately, so that a
  // long row loses few bits.
  __device__ __forceinline__ void exponentiate(float (&s)[n], float scale_log2) {
#pragma unroll
    for (int i = 0; i < n; ++i)
      s[i] = ptx::ex2_approx(fmaf(s[i], scale_log2, -reference[i / 2 % 2]));
    if constexpr (sums_exact) {
      float partial[2] = {s[0], s[2]};
#pragma unroll
      for (int i = 1; i < n; ++i)
        if (i != 2) partial[i / 2 % 2] += s[i];
      exact[0] += partial[0], exact[1] += partial[1];
    }
  }

  // Rounds probabilities into MMA operands: p[2 j + half] holds keys 8 j + 2 (lane % 4) and the
  // next.
  template <class Traits>
  __device__ __forceinline__ void round(const float (&s)[n], uint32_t (&p)[n / 2]) {
    float partial[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      p[i] = Traits::pack(s[2 * i], s[2 * i + 1]);
      if constexpr (sums_rounded)
        partial[i % 2] += Traits::to_float(static_cast<uint16_t>(p[i])) +
                          Traits::to_float(static_cast<uint16_t>(p[i] >> 16));
    }
    if constexpr (sums_rounded) sum[0] += partial[0], sum[1] += partial[1];
  }
};

// Masks the scores of row `half`, except for the visible keys.
template <int n>
__device__ __forceinline__ void mask_row(float (&s)[n], int half, uint32_t visible) {
  static_assert(n <= 64, "a bit per key of a row");
#pragma unroll
  for (int i = 0; i < n / 2; ++i)
    if (!(visible >> i & 1)) s[i / 2 * 4 + 2 * half + i % 2] = -CUDART_INF_F;
}

}  // namespace blockflash
