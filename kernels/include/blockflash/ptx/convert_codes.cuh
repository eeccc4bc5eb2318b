// Conversion of f32 to codes of 8 bits (sm_89): to nearest, ties to even, the greatest number
// beyond it, and 0x7f for NaN.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// The first number becomes the lowest byte.
__device__ __forceinline__ uint32_t e4m3x4_of_f32x4(float a, float b, float c, float d) {
  uint32_t x;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

__device__ __forceinline__ uint32_t e5m2x4_of_f32x4(float a, float b, float c, float d) {
  uint32_t x;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

}  // namespace blockflash::ptx
