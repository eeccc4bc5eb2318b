// movmatrix (sm_75): transposes an 8×8 matrix of 16-bit elements that is in the registers of a
// warp.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Lane l holds row l / 4, columns 2 (l % 4) and the next; afterwards it holds column l / 4, rows 2
// (l % 4) and the next.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace blockflash::ptx
