// Conversions between f32 and the 16-bit element types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "blockflash/params/base.h"
#include "blockflash/ptx/math.cuh"

namespace blockflash {

template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<__half> {
  static constexpr uint32_t exponent_mask = 0x7C00;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  // x·0 + sum in both halves: becomes NaN once x is NaN or infinite.
  static __device__ __forceinline__ uint32_t zero_times_plus(uint32_t x, uint32_t sum) {
    return ptx::fma_f16x2(x, 0, sum);
  }
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
  }
};

template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr uint32_t exponent_mask = 0x7F80;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ uint32_t zero_times_plus(uint32_t x, uint32_t sum) {
    return ptx::fma_bf16x2(x, 0, sum);
  }
  static __device__ __forceinline__ float to_float(uint16_t bits) {
    return __bfloat162float(__ushort_as_bfloat16(bits));
  }
};

// Whether a 16-bit element is NaN or infinite.
template <class Element>
__device__ __forceinline__ bool is_nonfinite(uint32_t bits) {
  constexpr uint32_t mask = ElementTraits<Element>::exponent_mask;
  return (bits & mask) == mask;
}

// An element whose type is known at run time only.
__device__ __forceinline__ float load_element(const void* at, int64_t i, int dtype) {
  if (dtype == BLOCKFLASH_DTYPE_F32) return static_cast<const float*>(at)[i];
  const uint16_t bits = static_cast<const uint16_t*>(at)[i];
  return dtype == BLOCKFLASH_DTYPE_F16 ? ElementTraits<__half>::to_float(bits)
                                       : ElementTraits<__nv_bfloat16>::to_float(bits);
}

}  // namespace blockflash
