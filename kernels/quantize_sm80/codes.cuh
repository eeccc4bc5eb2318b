// Numbers divided by their scale, and their codes, with the bits of the CPU.
#pragma once

#include "blockflash/decode/encode.cuh"
#include "blockflash/ptx/convert_codes.cuh"

namespace blockflash {
namespace {

constexpr int kPiece = 8;   // elements that are neighbours in memory
constexpr int kPieces = 2;  // of a thread, in one row
constexpr int kOwn = kPieces * kPiece;

// A scale, whose reciprocal serves all elements that share it.
struct Divisor {
  float by, reciprocal;
  bool is_usual;

  static __device__ __forceinline__ Divisor of(float by) {
    const bool is_usual = by >= 0x1p-60f && by <= 0x1p60f;
    return {by, is_usual ? __frcp_rn(by) : 0.f, is_usual};
  }

  // Quotients whose codes are those of IEEE's quotients.
  //
  // The first product is off by less than 2 units in the last place. A correction by its remainder
  // brings it to one of the two neighbours of the quotient, and a second one to the nearest, since
  // the reciprocal is the nearest one (Markstein 1990). Remainders are exact unless the quotient is
  // below 2^-40, which has the code of 0. The remainder is the negative one, so that it is +0 where
  // it vanishes, and adding -0 leaves the sign of 0. Elements that a chosen scale divides are
  // bounded. Others may be far beyond the greatest code, where remainders may be infinite: there
  // the product will do, and so it does for infinities and NaN.
  __device__ __forceinline__ void divide(float (&x)[kOwn], bool are_bounded) const {
    if (!is_usual) {
      // One division in the machine code: each quotient goes to the end.
#pragma unroll 1
      for (int i = 0; i < kOwn; ++i) {
        const float q = __fdiv_rn(x[0], by);
#pragma unroll
        for (int j = 1; j < kOwn; ++j) x[j - 1] = x[j];
        x[kOwn - 1] = q;
      }
      return;
    }
    const auto corrected = [this](float x, float q) {
      return __fmaf_rn(__fmaf_rn(by, q, -x), -reciprocal, q);
    };
    if (are_bounded) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        x[i] = corrected(x[i], corrected(x[i], __fmul_rn(x[i], reciprocal)));
      return;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float product = __fmul_rn(x[i], reciprocal);
      const float q = corrected(x[i], corrected(x[i], product));
      x[i] = fabsf(product) < 0x1p17f ? q : product;
    }
  }
};

// Codes of some numbers, four in each word, the first one in its lowest byte.
template <int count>
__device__ __forceinline__ void encode(const float (&x)[count], int dtype,
                                       uint32_t (&words)[count / 4]) {
  const auto pack = [&](int i, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    words[i / 4] = __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
  };
  if (dtype == BLOCKFLASH_DTYPE_I8) {
    // The sum with 1.5 · 2^23 is rounded to an integer, which is in its last bits.
    const auto code = [](float x) {
      const float bounded = x == x ? fminf(fmaxf(x, -127.f), 127.f) : 0.f;
      return __float_as_uint(__fadd_rn(bounded, 0x1.8p23f));
    };
#pragma unroll
    for (int i = 0; i < count; i += 4)
      pack(i, code(x[i]), code(x[i + 1]), code(x[i + 2]), code(x[i + 3]));
    return;
  }
#if __CUDA_ARCH__ >= 890
  if (dtype == BLOCKFLASH_DTYPE_E4M3) {
#  pragma unroll
    for (int i = 0; i < count; i += 4)
      words[i / 4] = ptx::e4m3x4_of_f32x4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else {
#  pragma unroll
    for (int i = 0; i < count; i += 4)
      words[i / 4] = ptx::e5m2x4_of_f32x4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
#else
  const auto code = [=](float x) { return code_of(x, dtype); };
#  pragma unroll
  for (int i = 0; i < count; i += 4)
    pack(i, code(x[i]), code(x[i + 1]), code(x[i + 2]), code(x[i + 3]));
#endif
}

}  // namespace
}  // namespace blockflash
