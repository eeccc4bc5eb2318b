// Loads under conditions of what nobody writes while the kernel runs, without branches, so that
// many are in flight.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Loads 4 bytes, or 2 bytes, zero-extended, or gives zeros. Stays where it is: the compiler would
// move it to where the value is used.
__device__ __forceinline__ uint32_t load_early_4_or_2_bytes_if(const void* at, bool four,
                                                               bool two) {
  uint32_t x;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      ".reg .u16 h;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "setp.ne.u32 q, %3, 0;\n"
      "mov.u16 h, 0;\n"
      "@q ld.global.nc.u16 h, [%1];\n"
      "cvt.u32.u16 %0, h;\n"
      "@p ld.global.nc.u32 %0, [%1];\n"
      "}\n"
      : "=r"(x)
      : "l"(at), "r"(static_cast<uint32_t>(four)), "r"(static_cast<uint32_t>(two)));
  return x;
}

// Loads a byte, or gives ones.
__device__ __forceinline__ uint32_t load_byte_if(const uint8_t* at, bool loads) {
  uint32_t x;
  asm("{\n"
      ".reg .pred p;\n"
      ".reg .u16 h;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "mov.u16 h, 255;\n"
      "@p ld.global.nc.u8 h, [%1];\n"
      "cvt.u32.u16 %0, h;\n"
      "}\n"
      : "=r"(x)
      : "l"(at), "r"(static_cast<uint32_t>(loads)));
  return x;
}

}  // namespace blockflash::ptx
