// Loads and stores eight neighbouring elements of an array whose type is known at run time.
// `vectorized`: the array is 16-byte aligned.
#pragma once

#include <stdint.h>

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/staging.cuh"
#include "blockflash/params/bsr.h"

namespace blockflash {

__device__ __forceinline__ void load_eight(float (&x)[8], const void* from, int dtype,
                                           bool vectorized, int64_t at) {
  if (dtype == BLOCKFLASH_DTYPE_F32) {
    const float* const values = static_cast<const float*>(from) + at;
    if (vectorized) {
      *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(values);
      *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(values + 4);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = values[i];
    }
    return;
  }
  const uint16_t* const values = static_cast<const uint16_t*>(from) + at;
  uint32_t words[4];
  if (vectorized) {
    *reinterpret_cast<uint4*>(words) = *reinterpret_cast<const uint4*>(values);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = values[2 * i] | static_cast<uint32_t>(values[2 * i + 1]) << 16;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    x[i] = dtype == BLOCKFLASH_DTYPE_F16 ? ElementTraits<__half>::to_float(bits)
                                         : ElementTraits<__nv_bfloat16>::to_float(bits);
  }
}

__device__ __forceinline__ void store_eight(void* to, int dtype, bool vectorized, int64_t at,
                                            const float (&x)[8]) {
  if (dtype == BLOCKFLASH_DTYPE_F32) {
    float* const values = static_cast<float*>(to) + at;
    if (vectorized) {
      reinterpret_cast<float4*>(values)[0] = make_float4(x[0], x[1], x[2], x[3]);
      reinterpret_cast<float4*>(values)[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = x[i];
    }
    return;
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack(dtype, x[2 * i], x[2 * i + 1]);
  uint16_t* const values = static_cast<uint16_t*>(to) + at;
  if (vectorized) {
    *reinterpret_cast<uint4*>(values) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
}

}  // namespace blockflash
