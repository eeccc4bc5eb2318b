// Softmax-weighted sums over some keys, and how those of disjoint sets of keys are combined: always
// in ascending order, and by the same operations, so that the result does not depend on who
// combines them.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "blockflash/attention/scores.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/ptx/math.cuh"

namespace blockflash {

// Four columns of a row: sums of 2^(score - reference) · v, and what belongs to the whole row.
struct Partial {
  float4 sum;
  float reference, denominator;  // log2 units; sum of 2^(score - reference)
};

constexpr Partial kNoPartial{{0.f, 0.f, 0.f, 0.f}, kNoReference, 0.f};

// Adds a part that is scaled by `weight` after `all` was scaled by `rescale`.
__device__ __forceinline__ void add_scaled(Partial& all, float rescale, const Partial& x,
                                           float weight) {
  all.denominator = fmaf(weight, x.denominator, all.denominator * rescale);
  all.sum.x = fmaf(weight, x.sum.x, all.sum.x * rescale);
  all.sum.y = fmaf(weight, x.sum.y, all.sum.y * rescale);
  all.sum.z = fmaf(weight, x.sum.z, all.sum.z * rescale);
  all.sum.w = fmaf(weight, x.sum.w, all.sum.w * rescale);
}

// Adds the next part.
__device__ __forceinline__ void add(Partial& all, const Partial& x) {
  const float before = all.reference;
  all.reference = fmaxf(before, x.reference);
  add_scaled(all, ptx::ex2_approx(before - all.reference), x,
             ptx::ex2_approx(x.reference - all.reference));
}

// The combination of all of `count` parts at once.
template <int count, class Part>
__device__ __forceinline__ Partial combine(const Part& part_of) {
  Partial parts[count], all = kNoPartial;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    parts[i] = part_of(i);
    all.reference = fmaxf(all.reference, parts[i].reference);
  }
#pragma unroll
  for (int i = 0; i < count; ++i)
    add_scaled(all, 1.f, parts[i], ptx::ex2_approx(parts[i].reference - all.reference));
  return all;
}

// The combinations of `count` parts each, one after another, of which `batch` of each are loaded at
// once, since a load takes long. With `inner` > 1 as many are first combined with each other.
template <int inner, int batch, int pieces, class Part>
__device__ __forceinline__ void combine_in_order(int count, const Part& part_of,
                                                 Partial (&all)[pieces]) {
  static_assert(batch % inner == 0, "what is combined first is loaded at once");
  Partial few[pieces];
#pragma unroll
  for (int n = 0; n < pieces; ++n) all[n] = few[n] = kNoPartial;
#pragma unroll 1
  for (int first = 0; first < count; first += batch) {
    Partial parts[pieces][batch];
#pragma unroll
    for (int n = 0; n < pieces; ++n)
#pragma unroll
      for (int i = 0; i < batch; ++i)
        parts[n][i] = first + i < count ? part_of(n, first + i) : kNoPartial;
#pragma unroll
    for (int n = 0; n < pieces; ++n)
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (first + i < count) add(inner > 1 ? few[n] : all[n], parts[n][i]);
        if (inner > 1 && i % inner == inner - 1 && first + i + 1 - inner < count)
          add(all[n], few[n]), few[n] = kNoPartial;
      }
  }
}
template <int inner, int batch, class Part>
__device__ __forceinline__ Partial combine_in_order(int count, const Part& part_of) {
  Partial all[1];
  combine_in_order<inner, batch>(count, [&](int, int s) { return part_of(s); }, all);
  return all[0];
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
  const float scale = join_sink(x.reference, x.denominator, sink_log2);
  x.sum.x *= scale, x.sum.y *= scale, x.sum.z *= scale, x.sum.w *= scale;
}

// The natural logarithm of the sum of exponentials.
__device__ __forceinline__ float log_sum_exp(const Partial& x) {
  return fmaf(ptx::lg2_approx(x.denominator), kLn2, x.reference * kLn2);
}

}  // namespace blockflash
