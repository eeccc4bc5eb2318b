// Softmax-weighted sums over some keys, and how those of disjoint sets of keys are combined: always
// in ascending order, so that the result does not depend on who combines them.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "blockflash/mma/element.cuh"
#include "blockflash/ptx/math.cuh"

namespace blockflash {

// The reference of a row that has seen no key. It is finite, so that differences of references are
// numbers.
constexpr float kNoReference = -1e30f;

// Four columns of a row: sums of 2^(score - reference) · v, and what belongs to the whole row.
struct Partial {
  float4 sum;
  float reference, denominator;  // log2 units; sum of 2^(score - reference)
};

// The combination of `count` parts, of which `batch` are loaded at once, since a load takes long.
template <int batch, class Logs, class Sums>
__device__ __forceinline__ Partial combine(int count, const Logs& logs_of, const Sums& sum_of) {
  Partial all{make_float4(0.f, 0.f, 0.f, 0.f), kNoReference, 0.f};
#pragma unroll 1
  for (int first = 0; first < count; first += batch) {
    float2 logs[batch];
    float4 sums[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const bool exists = first + i < count;
      logs[i] = exists ? logs_of(first + i) : make_float2(kNoReference, 0.f);
      sums[i] = exists ? sum_of(first + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    const float before = all.reference;
#pragma unroll
    for (int i = 0; i < batch; ++i) all.reference = fmaxf(all.reference, logs[i].x);
    const float rescale = ptx::ex2_approx(before - all.reference);
    all.denominator *= rescale;
    all.sum.x *= rescale, all.sum.y *= rescale, all.sum.z *= rescale, all.sum.w *= rescale;
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const float weight = ptx::ex2_approx(logs[i].x - all.reference);
      all.denominator = fmaf(weight, logs[i].y, all.denominator);
      all.sum.x = fmaf(weight, sums[i].x, all.sum.x);
      all.sum.y = fmaf(weight, sums[i].y, all.sum.y);
      all.sum.z = fmaf(weight, sums[i].z, all.sum.z);
      all.sum.w = fmaf(weight, sums[i].w, all.sum.w);
    }
  }
  return all;
}

// What the columns are multiplied by in the end. A row without keys has a denominator of exactly 0
// and becomes 0; NaN is not equal to 0 and passes through.
__device__ __forceinline__ float reciprocal(const Partial& x) {
  return x.denominator == 0.f ? 0.f : ptx::rcp_approx(x.denominator);
}

template <class Element>
__device__ __forceinline__ uint2 quotient(const Partial& x) {
  const float scale = reciprocal(x);
  return make_uint2(ElementTraits<Element>::pack(x.sum.x * scale, x.sum.y * scale),
                    ElementTraits<Element>::pack(x.sum.z * scale, x.sum.w * scale));
}

// Adds a logit without a value.
__device__ __forceinline__ void add_sink(Partial& x, float sink_log2) {
  const float moved = fmaxf(x.reference, sink_log2);
  const float scale = ptx::ex2_approx(x.reference - moved);
  x.denominator = fmaf(x.denominator, scale, ptx::ex2_approx(sink_log2 - moved));
  x.sum.x *= scale, x.sum.y *= scale, x.sum.z *= scale, x.sum.w *= scale;
  x.reference = moved;
}

// The natural logarithm of the sum of exponentials.
__device__ __forceinline__ float log_sum_exp(const Partial& x) {
  constexpr float kLn2 = 0.6931471805599453f;
  return fmaf(ptx::lg2_approx(x.denominator), kLn2, x.reference * kLn2);
}

}  // namespace blockflash
