// cp.async of words (sm_80). PTX ISA, "Data Movement: Non-bulk copy".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Copies 4 bytes, through L1, or writes zeros without reading.
__device__ __forceinline__ void cp_async_ca_4_or_zero(uint32_t dst_smem, const void* src,
                                                      bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst_smem), "l"(src),
               "r"(exists ? 4 : 0)
               : "memory");
}

}  // namespace blockflash::ptx
