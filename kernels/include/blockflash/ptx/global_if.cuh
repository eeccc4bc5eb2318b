// Loads from global memory under conditions, without branches, so that many are in flight.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Loads 4 bytes where index < wide, 2 bytes, zero-extended, where index < narrow, and otherwise
// gives zeros. The memory is not written while the kernel runs.
template <int index>
__device__ __forceinline__ uint32_t load_4_or_2_bytes_if(const void* at, int wide, int narrow) {
  uint32_t x;
  asm("{\n"
      ".reg .pred p, q;\n"
      ".reg .u16 h;\n"
      "setp.gt.s32 p, %2, %4;\n"
      "setp.gt.s32 q, %3, %4;\n"
      "mov.u16 h, 0;\n"
      "@q ld.global.nc.u16 h, [%1];\n"
      "cvt.u32.u16 %0, h;\n"
      "@p ld.global.nc.u32 %0, [%1];\n"
      "}\n"
      : "=r"(x)
      : "l"(at), "r"(wide), "r"(narrow), "n"(index));
  return x;
}

}  // namespace blockflash::ptx
