// Codes of 8 bits as f16, for products in f16, which holds all of them exactly.
#pragma once

#include <cuda_fp16.h>
#include <math_constants.h>
#include <stdint.h>

#include "blockflash/params/kv_cache_scaled.h"
#include "blockflash/ptx/convert_e4m3.cuh"
#include "blockflash/ptx/math.cuh"
#include "blockflash/ptx/permute.cuh"

namespace blockflash {

// Which of the four codes of a word are in the halves of the first f16x2; the others are in those
// of the second.
enum class CodeOrder { kAdjacent, kAlternate };  // 0 and 1, or 0 and 2

// Each has
//   widen           four codes as two f16x2,
//   kUnit           what widened codes are to be multiplied with,
//   kHasNonfinite   whether there are NaN or infinities,
//   kHidesNan       whether `widen` gives numbers for NaN,
//   is_nonfinite    of one code.
template <int dtype>
struct Codes;

template <>
struct Codes<BLOCKFLASH_DTYPE_E4M3> {
#if __CUDA_ARCH__ >= 890
  static constexpr bool kConverts = true;
#else
  static constexpr bool kConverts = false;
#endif
  // Shifted into f16 they are too small by the difference of the biases.
  static constexpr float kUnit = kConverts ? 1.f : 256.f;
  static constexpr bool kHasNonfinite = true, kHidesNan = !kConverts;

  template <CodeOrder order>
  static __device__ __forceinline__ void widen(uint32_t x, uint32_t& low, uint32_t& high) {
    constexpr bool adjacent = order == CodeOrder::kAdjacent;
    if constexpr (kConverts) {
      ptx::f16x4_of_e4m3x4(adjacent ? x : ptx::permute_bytes(x, 0, 0x3120), low, high);
    } else {
      const uint32_t first = ptx::permute_bytes(x, 0, adjacent ? 0x1404 : 0x2404);
      const uint32_t second = ptx::permute_bytes(x, 0, adjacent ? 0x3424 : 0x3414);
      low = (first & 0x80008000) | (first >> 1 & 0x3f803f80);
      high = (second & 0x80008000) | (second >> 1 & 0x3f803f80);
    }
  }
  static __device__ __forceinline__ bool is_nonfinite(uint32_t code) {
    return (code & 0x7f) == 0x7f;
  }
};

template <>
struct Codes<BLOCKFLASH_DTYPE_E5M2> {
  static constexpr float kUnit = 1.f;
  static constexpr bool kHasNonfinite = true, kHidesNan = false;

  // The upper half of f16.
  template <CodeOrder order>
  static __device__ __forceinline__ void widen(uint32_t x, uint32_t& low, uint32_t& high) {
    constexpr bool adjacent = order == CodeOrder::kAdjacent;
    low = ptx::permute_bytes(x, 0, adjacent ? 0x1404 : 0x2404);
    high = ptx::permute_bytes(x, 0, adjacent ? 0x3424 : 0x3414);
  }
  static __device__ __forceinline__ bool is_nonfinite(uint32_t code) {
    return (code & 0x7c) == 0x7c;
  }
};

template <>
struct Codes<BLOCKFLASH_DTYPE_I8> {
  static constexpr float kUnit = 1.f;
  static constexpr bool kHasNonfinite = false, kHidesNan = false;

  // The code plus 128 below the exponent of 1024, minus 1152.
  template <CodeOrder order>
  static __device__ __forceinline__ void widen(uint32_t x, uint32_t& low, uint32_t& high) {
    constexpr bool adjacent = order == CodeOrder::kAdjacent;
    constexpr uint32_t exponents = 0x64646464, one = 0x3c003c00, bias = 0xe480e480;
    const uint32_t positive = x ^ 0x80808080;
    low = ptx::permute_bytes(positive, exponents, adjacent ? 0x4140 : 0x4240);
    high = ptx::permute_bytes(positive, exponents, adjacent ? 0x4342 : 0x4341);
    low = ptx::fma_f16x2(low, one, bias), high = ptx::fma_f16x2(high, one, bias);
  }
  static __device__ __forceinline__ bool is_nonfinite(uint32_t) { return false; }
};

// A bit of each code that is NaN, for codes of e4m3.
__device__ __forceinline__ uint32_t nan_bits_e4m3(uint32_t x) {
  return (x & 0x7f7f7f7f) + 0x01010101 & 0x80808080;
}

// One code.
template <class Type>
__device__ __forceinline__ float code_to_float(uint8_t code) {
  if (Type::kHidesNan && Type::is_nonfinite(code)) return CUDART_NAN_F;
  uint32_t low, high;
  Type::template widen<CodeOrder::kAdjacent>(code, low, high);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(low))) * Type::kUnit;
}

}  // namespace blockflash
