// Which cluster of the grid a CTA belongs to.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// The number of this cluster in a grid of one dimension.
__device__ __forceinline__ uint32_t cluster_number() {
  uint32_t number;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return number;
}

}  // namespace blockflash::ptx
