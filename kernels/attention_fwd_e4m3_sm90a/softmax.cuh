// Online softmax with probabilities in e4m3.
//
// Probabilities are relative to the largest score of their own key tile, times 2^8, so that every
// tile uses the whole range of e4m3. The product of a tile with V is summed in registers of its own
// and joins the output with a factor, its weight, that relates the tile to the reference of the
// row. Row sums are those of the unrounded probabilities.
#pragma once

#include "../attention_fwd_sm90a/softmax.cuh"
#include "blockflash/ptx/convert_codes.cuh"

namespace blockflash {

// 2^x for x up to 127 by the FMA units, with a relative error of 1e-4 and none for integers: what
// special function units take eight cycles for. Below 2^-120 it is that.
__device__ __forceinline__ float exp2_by_cubic(float x) {
  constexpr float kRounder = 12582912.f;  // 1.5·2^23: a sum with it is rounded to an integer
  const float y = fmaxf(x, -120.f), whole = y + kRounder, part = y - (whole - kRounder);
  const float power =
      fmaf(fmaf(fmaf(part, 0.05500893f, 0.24221097f), part, 0.69328293f), part, 1.f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(whole) << 23));
}

// n scores of a lane: s[4 j + 2 half + e] is key 8 j + 2 (lane % 4) + e of its row `half`.
template <int n>
struct TileSoftmax {
  // The largest probability of a tile, a power of two.
  static constexpr float kTopLog2 = 8.f;
  // How far the largest score of a tile may exceed the reference of its row, in powers of two: the
  // sums stay within f32.
  static constexpr float kSlack = 60.f;

  float reference[2];  // per row, in powers of two
  float sum[2];        // this lane's share of the sum of probabilities, relative to the reference

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = kNoReference;
    sum[0] = sum[1] = 0.f;
  }

  // The largest scores of both rows. As integers floats have their order if one is positive: the
  // result is negative where this one is to be ignored. Two chains per row halve the latency.
  static __device__ __forceinline__ void largest(const float (&s)[n], float (&top)[2]) {
    int bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_int(s[2 * i]);
#pragma unroll
    for (int i = 0; i < n; i += 2)
      bits[i / 2 % 4] =
          __vimax3_s32(bits[i / 2 % 4], __float_as_int(s[i]), __float_as_int(s[i + 1]));
    // NaN is the largest integer.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int x = max(bits[half], bits[half + 2]);
      x = max(x, __shfl_xor_sync(~0u, x, 1));
      top[half] = __int_as_float(max(x, __shfl_xor_sync(~0u, x, 2)));
    }
  }
  // The same for any scores.
  static __device__ __forceinline__ void largest_of_any(const float (&s)[n], float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = s[2 * half];
#pragma unroll
      for (int i = 2 * half; i < n; i += 4) x = fmaxf(x, fmaxf(s[i], s[i + 1]));
      top[half] = quad_max(x);
    }
  }

  // Turns scores into probabilities. `scale` is positive. If a reference moves, what was summed
  // before becomes smaller: `shrink` is called with the factors of both rows. `weight` gets those
  // of this tile.
  template <bool is_masked, class Shrink>
  __device__ __forceinline__ void probabilities(float (&s)[n], float scale, float (&weight)[2],
                                                const Shrink& shrink) {
    float top[2], shift[2];
    largest(s, top);
    bool unusual = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] *= scale;
      // Negative scores, among them rows without a visible key; NaN; scores beyond the slack of the
      // reference, which is finite, or beyond the fused exponent.
      unusual |= !(top[half] >= 0.f && top[half] <= fminf(reference[half] + kSlack, kFusedLimit));
      shift[half] = top[half];
    }
    if (__any_sync(~0u, unusual)) {
      const bool has_nan[2] = {top[0] != top[0], top[1] != top[1]};
      largest_of_any(s, top);
      float factors[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half] * scale, kNoReference);
        const float moved = top[half] > reference[half] + kSlack ? top[half] : reference[half];
        factors[half] = ptx::ex2_approx(reference[half] - moved);
        reference[half] = moved, sum[half] *= factors[half];
        // A row with a NaN becomes NaN.
        shift[half] = has_nan[half] ? CUDART_NAN_F : top[half];
        if (has_nan[half] || !is_beyond_fused(top[half])) continue;
        shift[half] = 0.f;
        const float inverse = ptx::rcp_approx(scale);
#pragma unroll
        for (int i = 2 * half; i < n; i += 4)
#pragma unroll
          for (int e = i; e < i + 2; ++e)
            s[e] = with_rounded_product(s[e], scale, inverse, top[half], 0.f);
      }
      shrink(factors);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight[half] = ptx::ex2_approx(top[half] - reference[half] - kTopLog2);
      shift[half] -= kTopLog2;
    }
    // A quarter of the exponentials is left to the FMA units, which would wait for the others. They
    // are not those of masked scores, which are exactly 0.
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float x = fmaf(s[i], scale, -shift[i / 2 % 2]);
      s[i] = !is_masked && (i % 8 == 1 || i % 8 == 7) ? exp2_by_cubic(x) : ptx::ex2_approx(x);
    }
    float partial[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 1; i < n; ++i)
      if (i != 2) partial[i / 2 % 2] += s[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = fmaf(partial[half], weight[half], sum[half]);
  }

  // Rounds probabilities into MMA operands: byte i of p[2 j + half] is key 16 j + 2 (lane % 4) +
  // i / 2 * 8 + i % 2.
  static __device__ __forceinline__ void round(const float (&s)[n], uint32_t (&p)[n / 4]) {
#pragma unroll
    for (int j = 0; j < n / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const x = s + 8 * j + 2 * half;
        p[2 * j + half] = ptx::e4m3x4_of_f32x4(x[0], x[1], x[4], x[5]);
      }
  }
};

}  // namespace blockflash
