// elect (sm_90): one thread of a warp, in a form that the compiler recognises.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// True in one lane, always the same. All lanes of the warp must execute it together.
__device__ __forceinline__ bool elect() {
  uint32_t elected;
  asm volatile("{.reg .pred elected; elect.sync _|elected, 0xFFFFFFFF; selp.u32 %0, 1, 0, elected;}"
               : "=r"(elected));
  return elected != 0;
}

}  // namespace blockflash::ptx
