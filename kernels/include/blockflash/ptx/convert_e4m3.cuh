// Conversion of e4m3 (sm_89).
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Bytes 0 and 1 become the halves of `low`, bytes 2 and 3 those of `high`. Exact.
__device__ __forceinline__ void f16x4_of_e4m3x4(uint32_t x, uint32_t& low, uint32_t& high) {
  asm("{\n\t.reg .b16 first, second;\n\tmov.b32 {first, second}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n\tcvt.rn.f16x2.e4m3x2 %1, second;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(x));
}

}  // namespace blockflash::ptx
