// Codes of 8 bits from f32, with the same bits as on the CPU.
#pragma once

#include <stdint.h>

#include "blockflash/params/kv_cache_scaled.h"

namespace blockflash {

// A code of a floating-point format whose least exponent is 1 - bias: to nearest, ties to even, and
// `most`, the code of the greatest number, beyond that.
template <int fraction, int bias, int most>
__device__ __forceinline__ uint32_t float_code(float x) {
  constexpr int kDropped = 23 - fraction;
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
  const uint32_t bits = __float_as_uint(x) & 0x7fffffff;
  if (bits > 0x7f800000) return 0x7f;
  if (bits < (128u - bias) << 23) {
    // A sum with 2^23 steps below the smallest normal number is rounded to steps, whose number is
    // in its last bits.
    const float steps = __uint_as_float((151u - bias - fraction) << 23);
    return sign | (__float_as_uint(__fadd_rn(__uint_as_float(bits), steps)) & 0xff);
  }
  const uint32_t rounded = bits + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
  return sign | min((rounded >> kDropped) - ((127u - bias) << fraction), uint32_t{most});
}

__device__ __forceinline__ uint32_t code_of(float x, int dtype) {
  if (dtype == BLOCKFLASH_DTYPE_E4M3) return float_code<3, 7, 0x7e>(x);
  if (dtype == BLOCKFLASH_DTYPE_E5M2) return float_code<2, 15, 0x7b>(x);
  if (x != x) return 0;
  return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(x, -127.f), 127.f))) & 0xff;
}

__device__ __forceinline__ float greatest_code(int dtype) {
  return dtype == BLOCKFLASH_DTYPE_E4M3 ? 448.f : dtype == BLOCKFLASH_DTYPE_E5M2 ? 57344.f : 127.f;
}

}  // namespace blockflash
