// ldmatrix (sm_75): four 8×8 matrices of 16-bit elements from shared memory into MMA fragments.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Lane l supplies the address of row l % 8 of matrix l / 8; r[i] receives this lane's two elements
// of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_smem)
               : "memory");
}

// The same, with each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_smem)
               : "memory");
}

}  // namespace blockflash::ptx
