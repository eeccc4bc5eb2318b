// stmatrix (sm_90): MMA fragments of 16-bit elements to shared memory as four 8×8 matrices, the
// inverse of ldmatrix.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Lane l supplies the address of row l % 8 of matrix l / 8; r[i] holds this lane's two elements of
// matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t row_smem, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_smem),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same, with each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row_smem, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_smem),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

}  // namespace blockflash::ptx
