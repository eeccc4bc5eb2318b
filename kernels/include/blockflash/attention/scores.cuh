// What happens to a score between q·k and the softmax, in the order of blockflash_scores: the scale
// is a factor in the exponent (exponent.cuh); the softcap; the mask, as ranges of visible keys; and
// the sink, which joins the denominator in the end.
#pragma once

#include <stdint.h>

#include "blockflash/attention/exponent.cuh"
#include "blockflash/params/scores.h"
#include "blockflash/ptx/math.cuh"

namespace blockflash {

// softcap·tanh(x·scale_over_cap), as exact as f32 scores are. tanh.approx would have an error of
// softcap·2^-11, and 1 - 2 / (e^2y + 1) alone cancels for small y, which shows in the log-sum-exp
// of short rows. Small arguments therefore take an odd polynomial (minimax on |y| < 0.625, relative
// error 2e-7). Its leading coefficient is factored out so that every step takes its constant as an
// immediate: the Hopper kernel for head_dim 64 has no register left to hold one.
__device__ __forceinline__ float soft_cap(float x, const blockflash_scores& scores) {
  const float y = x * scores.scale_over_cap;
  if (fabsf(y) < 0.625f) {
    const float y2 = y * y;
    const float p = fmaf(fmaf(y2 - 3.41315164f, y2, 8.74028735f), y2, -21.8905116f);
    return scores.softcap * fmaf(p * (y2 * 0.01522686f), y, y);
  }
  return scores.softcap *
         fmaf(-2.f, ptx::rcp_approx(ptx::ex2_approx(y * (2.f * kLog2e)) + 1.f), 1.f);
}

// The derivative of the capped score with respect to the scaled one: 1 - tanh².
__device__ __forceinline__ float soft_cap_slope(float x, const blockflash_scores& scores) {
  const float y = ptx::ex2_approx(2.f * kLog2e * x * scores.scale_over_cap);
  const float t = fmaf(-2.f, ptx::rcp_approx(y + 1.f), 1.f);
  return fmaf(-t, t, 1.f);
}

// Caps scores in place, an array of any rank, if there is a softcap.
__device__ __forceinline__ void cap_each(float& s, const blockflash_scores& scores) {
  s = soft_cap(s, scores);
}
template <class Part, int n>
__device__ __forceinline__ void cap_each(Part (&s)[n], const blockflash_scores& scores) {
#pragma unroll
  for (int i = 0; i < n; ++i) cap_each(s[i], scores);
}
template <class Array>
__device__ __forceinline__ void cap_scores(Array& s, const blockflash_scores& scores) {
  if (scores.softcap > 0.f) cap_each(s, scores);
}

// Keys [begin, end).
struct KeyRange {
  int begin, end;
};

// Which keys a query attends to: causal masks, sliding windows, ends of sequences.
struct AttentionMask {
  int seqlen_kv;
  int diagonal;  // the key with which query 0 is aligned
  int window_left, window_right;

  static __device__ __forceinline__ AttentionMask of(const blockflash_window& window, int seqlen_q,
                                                     int seqlen_kv) {
    return {seqlen_kv, window.align_bottom_right ? seqlen_kv - seqlen_q : 0, window.left,
            window.right};
  }

  // Keys that query `row` attends to. Positions are 64-bit where windows may be as large as an int.
  template <class Position = int64_t>
  __device__ __forceinline__ KeyRange keys_of(int row) const {
    const Position center = static_cast<Position>(row) + diagonal;
    const Position begin = window_left == BLOCKFLASH_WINDOW_UNBOUNDED ? 0 : center - window_left;
    const Position end =
        window_right == BLOCKFLASH_WINDOW_UNBOUNDED ? seqlen_kv : center + window_right + 1;
    return {static_cast<int>(begin < 0           ? 0
                             : begin > seqlen_kv ? seqlen_kv
                                                 : begin),
            static_cast<int>(end < 0           ? 0
                             : end > seqlen_kv ? seqlen_kv
                                               : end)};
  }

  // Keys that some query of [first_row, last_row] attends to. Both ends grow with the row.
  template <class Position = int64_t>
  __device__ __forceinline__ KeyRange keys_of_any(int first_row, int last_row) const {
    return {keys_of<Position>(first_row).begin, keys_of<Position>(last_row).end};
  }

  // Keys that every query of [first_row, last_row] attends to.
  template <class Position = int64_t>
  __device__ __forceinline__ KeyRange keys_of_all(int first_row, int last_row) const {
    return {keys_of<Position>(last_row).begin, keys_of<Position>(first_row).end};
  }
};

// The units of a row's reference and of the logits that it is compared with.
struct Log2Units {
  static __device__ __forceinline__ float sink(const blockflash_scores& scores, int head) {
    return scores.sink[head] * kLog2e;
  }
  static __device__ __forceinline__ float exponential(float x) { return ptx::ex2_approx(x); }
};
struct NaturalUnits {
  static __device__ __forceinline__ float sink(const blockflash_scores& scores, int head) {
    return scores.sink[head];
  }
  static __device__ __forceinline__ float exponential(float x) {
    return ptx::ex2_approx(x * kLog2e);
  }
};

// Lets the sink of a head, a logit without a value, join a row: `denominator` sums the exponentials
// of score - reference. Returns the factor by which everything else that was summed so is to be
// multiplied. The bound keeps the differences of a row without keys, whose reference may be -inf,
// from being -inf - -inf.
template <class Units = Log2Units>
__device__ __forceinline__ float join_sink(float& reference, float& denominator, float sink) {
  const float moved = fmaxf(fmaxf(reference, sink), kNoReference);
  const float scale = Units::exponential(reference - moved);
  denominator = fmaf(denominator, scale, Units::exponential(sink - moved));
  reference = moved;
  return scale;
}

}  // namespace blockflash
