// Conversion to e4m3 (sm_89).
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// To nearest, ties to even, saturating; byte 0 is a.
__device__ __forceinline__ uint32_t e4m3x4_of_floats(float a, float b, float c, float d) {
  uint32_t x;
  asm("{\n\t.reg .b16 first, second;\n\tcvt.rn.satfinite.e4m3x2.f32 first, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 second, %4, %3;\n\tmov.b32 %0, {first, second};\n\t}"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

}  // namespace blockflash::ptx
