// Tiled copies of the tensor memory accelerator (sm_90). PTX ISA, "Data Movement and Conversion: cp.async.bulk.tensor".
#pragma once

#include <stdint.h>

#include "../params.h"

namespace blockflash::ptx {

// Starts the copy of the box at these coordinates (innermost first) to shared memory; its bytes count at the barrier. What lies outside
// the tensor arrives as zeros.
__device__ __forceinline__ void tensor_copy_4d(uint32_t dst_smem, const blockflash_tensor_map* map, int x, int y, int z, int w,
                                               uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
               :
               : "r"(dst_smem), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
               : "memory");
}

}  // namespace blockflash::ptx
