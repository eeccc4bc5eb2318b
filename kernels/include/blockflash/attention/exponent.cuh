// The exponent of a score, (s·c - reference) with c = scale·log2(e), where scores are large.
//
// One fused multiply-add computes it. It does not round the product, but the reference of a row is
// the rounded product of its largest score, so that score itself gets the rounding error of the
// reference as its exponent. Up to `kFusedLimit` that is at most 2^-11; at 1e10 it is 512, and the
// probability is infinite or 0. Beyond the limit the product is therefore rounded, too. Large
// scores are rare, so instead of a second loop of exponentials there is a step before it that
// changes the scores: then the fused operation subtracts a small number and gives the same
// exponent.
#pragma once

#include <float.h>

namespace blockflash {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

constexpr float kFusedLimit = 8192.f;  // in powers of two

// The reference of a row that has seen no key. It is finite, so that differences of references are
// numbers, and 2^x of a masked score, which is -inf, is 0.
constexpr float kNoReference = -FLT_MAX;

// Whether scores of this reference need `with_rounded_product`.
__device__ __forceinline__ bool is_beyond_fused(float reference) {
  return fabsf(reference) > kFusedLimit && fabsf(reference) < FLT_MAX;
}

// The same in one comparison, also true of rows that have seen no key.
__device__ __forceinline__ bool may_be_beyond_fused(float reference) {
  return fabsf(reference) > kFusedLimit;
}

// What takes the place of a score where `shown`, which is small, takes the place of the reference.
__device__ __forceinline__ float with_rounded_product(float s, float scale_log2, float inverse,
                                                      float reference, float shown) {
  return (__fsub_rn(__fmul_rn(s, scale_log2), reference) + shown) * inverse;
}

}  // namespace blockflash
